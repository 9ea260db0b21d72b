"""The adapter refuses what it was not tried with, and says what it knows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from services.actuator.engines.vllm import versions
from services.errors import UserError


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.1.dev3+cpu", "0.32"])
def test_releases_of_a_known_minor_version_are_taken(version: str) -> None:
    versions.check(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.320.0", "1.32.0", "", "dev"])
def test_any_other_is_refused_with_what_is_known(version: str) -> None:
    with pytest.raises(UserError, match=r"expected 0\.32\.x"):
        versions.check(version)


def test_one_engine_is_taken_whatever_its_tensor_and_pipeline_parallelism() -> None:
    versions.check_parallel(SimpleNamespace(data_parallel_size=1, data_parallel_index=0, tensor_parallel_size=4))


@pytest.mark.parametrize(("size", "index"), [(2, 0), (1, 1)])
def test_ranks_of_data_parallelism_are_refused_also_where_vllm_tells_them_that_they_are_alone(
    size: int, index: int
) -> None:
    with pytest.raises(UserError, match="2 ranks"):
        versions.check_parallel(SimpleNamespace(data_parallel_size=size, data_parallel_index=index))
