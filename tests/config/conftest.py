from __future__ import annotations

from collections.abc import Callable

import pytest

from rmsrepro.config.compose import Composer, to_train_config
from rmsrepro.config.errors import UserError
from rmsrepro.config.overrides import split_override
from rmsrepro.config.schema import TrainConfig
from rmsrepro.norms import list_norms, norm_info

Compose = Callable[..., TrainConfig]


@pytest.fixture
def compose() -> Compose:
    """Compose without resolving: `compose("model=gru", "norm=rmsnorm")`."""

    def run(*texts: str) -> TrainConfig:
        norms = {name: norm_info(name).params_class for name in list_norms()}
        with Composer(norms) as opened:
            return to_train_config(opened.raw([split_override(text) for text in texts]))

    return run


@pytest.fixture
def refused(compose: Compose) -> Callable[..., str]:
    """The message with which an override is refused."""

    def run(*texts: str) -> str:
        with pytest.raises(UserError) as caught:
            compose(*texts)
        message = str(caught.value)
        assert "\n" not in message
        return message

    return run
