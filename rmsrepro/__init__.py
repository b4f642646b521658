"""Does RMSNorm train as well as LayerNorm, and what does it save in time?"""

__version__ = "0.1.0"
