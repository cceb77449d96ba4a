"""The corpus and its batches."""

import pytest
import torch

from functitan.data import SEPARATOR, CorpusSource, decode, encode, load_corpus, ordered_windows, windows
from functitan.data.corpus import is_held_out, source_files, standard_library
from functitan.errors import ConfigError
from functitan.nn import IGNORE_INDEX


@pytest.fixture
def folder(tmp_path):
    for i in range(60):
        file = tmp_path / f"pkg{i % 3}" / f"file{i}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"x = {i}\n" * 10)
    for skipped in ("site-packages", "test", "pkg0/tests"):
        (tmp_path / skipped).mkdir()
        (tmp_path / skipped / "skipped.py").write_text("no")
    return tmp_path


@pytest.fixture
def source(folder):
    return CorpusSource(load_corpus(folder), batch_size=4, seq=16, seed=3)


def test_the_standard_library_has_text_and_no_packages():
    files = source_files(standard_library())
    assert "dataclasses.py" in files and files == sorted(files)
    assert not [f for f in files if {"site-packages", "test", "tests", "idle_test"} & set(f.split("/")[:-1])]
    assert any(is_held_out(f) for f in files)


def test_files_are_held_out_by_their_own_path(folder):
    corpus = load_corpus(folder)
    assert set(corpus.train_files).isdisjoint(corpus.valid_files) and corpus.valid_files
    assert len(corpus.train_files) + len(corpus.valid_files) == 60
    (folder / "another.py").write_text("y")
    more = load_corpus(folder)
    assert set(corpus.train_files) <= set(more.train_files) and set(corpus.valid_files) <= set(more.valid_files)
    assert int((corpus.train == SEPARATOR).sum()) == len(corpus.train_files)


def test_a_batch_is_a_function_of_seed_and_step(source):
    first, again, other = source.batch(5), source.batch(5), source.batch(6)
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["tokens"], other["tokens"])
    reseeded = CorpusSource(source.corpus, batch_size=4, seq=16, seed=4)
    assert not torch.equal(first["tokens"], reseeded.batch(5)["tokens"])
    assert {(k, tuple(v.shape), v.dtype) for k, v in first.items()} == {
        (k, (4, 16), torch.int64) for k in ("tokens", "labels", "segment_ids")
    }
    assert torch.equal(first["tokens"][:, 1:], first["labels"][:, :-1])


def test_segments_change_exactly_at_separators(source):
    batch = source.batch(0)
    changed = batch["segment_ids"].diff(dim=-1)
    assert torch.equal(changed == 1, batch["tokens"][:, 1:] == SEPARATOR)


def test_validation_covers_the_stream_in_batches_of_one_shape():
    stream = torch.arange(1, 36)
    batches = list(ordered_windows(stream, batch=2, seq=10, limit=9))
    assert [tuple(b["tokens"].shape) for b in batches] == [(2, 10)] * 2
    counted = torch.cat([b["labels"] for b in batches])
    assert int((counted != IGNORE_INDEX).sum()) == 30 and (counted[3] == IGNORE_INDEX).all()
    starts = [int(b["tokens"][i, 0]) for b in batches for i in (0, 1)][:3]
    assert starts == [1, 13, 25]
    assert len(list(ordered_windows(stream, batch=2, seq=10, limit=1))) == 1


def test_the_last_start_still_has_a_label():
    batch = windows(torch.arange(12), torch.tensor([1]), 10)
    assert int(batch["labels"][0, -1]) == 11


def test_text_round_trip():
    assert decode([SEPARATOR, *encode("né\n").tolist()]) == "né\n"
    assert decode([0xC3]) == "\ufffd"


def test_errors_name_the_numbers(source, tmp_path):
    with pytest.raises(ConfigError, match=r"4 x 100000 tokens(.|\n)*data\.seq"):
        CorpusSource(source.corpus, batch_size=4, seq=100000)
    with pytest.raises(ConfigError, match=r"has 0 \.py files"):
        (tmp_path / "empty").mkdir()
        load_corpus(tmp_path / "empty")
