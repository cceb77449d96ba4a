"""Parameters to a file and back."""

import pytest
import torch

from functitan.checkpoint import load_params, save_params, write_whole
from functitan.errors import ConfigError, TreeError


@pytest.fixture
def params():
    shared = torch.arange(6.0).reshape(2, 3)
    return {"layers": {"w": shared.T, "b": shared}, "scale": torch.ones(2, dtype=torch.bfloat16)}


def test_round_trip_with_shared_and_strided_leaves(tmp_path, params):
    path = tmp_path / "new" / "params.safetensors"
    save_params(path, params)
    loaded = load_params(path, params)
    for mine, other in ((loaded["layers"]["w"], params["layers"]["w"]), (loaded["scale"], params["scale"])):
        assert torch.equal(mine, other) and mine.dtype == other.dtype
    assert [p.name for p in path.parent.iterdir()] == ["params.safetensors"]


def test_all_differences_in_one_message(tmp_path, params):
    save_params(tmp_path / "p", params)
    wrong = {"layers": {"w": torch.ones(2), "bb": torch.ones(1)}, "scale": torch.ones(2)}
    with pytest.raises(ConfigError) as error:
        load_params(tmp_path / "p", wrong)
    text = str(error.value)
    assert "3 problems" in text and "layers/bb is missing" in text and "(3, 2) in the file" in text
    assert "layers/b is in the file" in text and 'Did you mean "layers/b"' in text


def test_unreadable_files_are_config_errors(tmp_path):
    with pytest.raises(ConfigError, match="there is no file"):
        load_params(tmp_path / "none", {})
    (tmp_path / "broken").write_bytes(b"not this format")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_params(tmp_path / "broken", {})


def test_a_leaf_that_is_no_tensor_is_refused(tmp_path):
    with pytest.raises(TreeError, match="w is a float"):
        save_params(tmp_path / "p", {"w": 1.0})


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "f"
    path.write_text("old")

    def fail(temporary):
        temporary.write_text("half")
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError):
        write_whole(path, fail)
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1
