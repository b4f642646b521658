"""Data: where text comes from, how it becomes tokens, and which of it makes batch number i.

`build_data` and `data_fingerprint` are all that the rest of the package needs. Torch and Lightning are
imported by the first only, `datasets` only by the sources that need it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import DataConfig, TranslationDataConfig
from rmsrepro.data.fingerprint import check_task, data_fingerprint
from rmsrepro.data.tables import taking_back

if TYPE_CHECKING:
    from rmsrepro.data.lm import LMData
    from rmsrepro.data.tokenizers import TextTokenizer
    from rmsrepro.data.translation import TranslationData

__all__ = ["build_data", "data_fingerprint"]


def build_data(
    config: DataConfig,
    task: str,
    *,
    seed: int,
    accumulate: int,
    cache_dir: Path,
    tokenizers: tuple[TextTokenizer, TextTokenizer] | None = None,
    fingerprint: str | None = None,
) -> LMData | TranslationData:
    """Read, tokenise and split the data of a run; everything is ready when this returns.

    Args:
        task: "lm" or "translation".
        seed: decides the order of the training batches, and nothing else.
        accumulate: batches an optimiser update.
        cache_dir: for trained tokenizers and tables (`config.cache_dir`, when set, wins).
        tokenizers: of source and target, from a trained model that other data are evaluated with; None:
            trained on the training split (language modelling uses the second).
        fingerprint: `data_fingerprint` of `config`, where it is known already: large files are then read
            once less.

    Raises:
        UserError: data that do not fit the task, cannot be found or read, or leave nothing to train on.
    """
    check_task(config, task)
    if accumulate < 1:
        raise UserError(f"trainer.accumulate={accumulate}: at least one batch makes an update")
    with taking_back():
        if isinstance(config, TranslationDataConfig):
            from rmsrepro.data.translation import TranslationData

            return TranslationData(
                config,
                seed=seed,
                accumulate=accumulate,
                cache_dir=cache_dir,
                tokenizers=tokenizers,
                fingerprint=fingerprint,
            )
        from rmsrepro.data.lm import LMData

        return LMData(
            config,
            seed=seed,
            accumulate=accumulate,
            cache_dir=cache_dir,
            tokenizers=tokenizers,
            fingerprint=fingerprint,
        )
