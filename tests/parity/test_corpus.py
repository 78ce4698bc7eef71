"""The data both frameworks see: one global batch a step, whatever the ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bridge.relay.corpus import SEPARATOR, VOCABULARY, Corpus, rank_slice


def small_corpus(folder: Path) -> Corpus:
    files = []
    for name, text in (("b.py", "y = 2\n" * 200), ("a.py", "x = 1  # é\n" * 100)):
        (folder / name).write_text(text, encoding="utf-8")
        files.append(folder / name)
    return Corpus.of_files(files)


def test_tokens_are_the_bytes_of_the_files_with_a_separator_between(tmp_path: Path) -> None:
    corpus = small_corpus(tmp_path)
    first = (tmp_path / "b.py").read_bytes()
    assert bytes(corpus.tokens[: len(first)].astype(np.uint8)) == first
    assert corpus.tokens[len(first)] == SEPARATOR
    assert (corpus.tokens == SEPARATOR).sum() == 1
    assert corpus.tokens.max() < VOCABULARY


def test_the_standard_library_has_enough_text_and_a_stable_fingerprint() -> None:
    corpus = Corpus.of_standard_library()
    assert corpus.tokens.size > 1_000_000
    assert corpus.sha256 == Corpus.of_standard_library().sha256
    assert 0.89 < corpus.train_size / corpus.tokens.size < 0.91


def test_links_of_the_standard_library_that_lead_nowhere_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = small_corpus(tmp_path)
    (tmp_path / "sitecustomize.py").symlink_to(tmp_path / "etc" / "sitecustomize.py")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    of_standard_library = Corpus.of_standard_library.__wrapped__
    assert sorted(of_standard_library().tokens) == sorted(expected.tokens)


def test_a_batch_depends_on_seed_and_step_alone_and_stays_in_the_train_split(tmp_path: Path) -> None:
    corpus = small_corpus(tmp_path)
    batch = corpus.global_batch(seed=3, step=7, batch=64, length=15)
    assert batch.shape == (64, 16)
    assert batch.dtype == np.int32
    for other in range(5):
        corpus.global_batch(seed=3, step=other, batch=64, length=15)
    np.testing.assert_array_equal(batch, corpus.global_batch(seed=3, step=7, batch=64, length=15))
    assert (batch != corpus.global_batch(seed=3, step=8, batch=64, length=15)).any()
    assert (batch != corpus.global_batch(seed=4, step=7, batch=64, length=15)).any()
    train = corpus.tokens[: corpus.train_size].astype(np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(train, 16)
    assert all((windows == row).all(axis=1).any() for row in batch)


def test_windows_begin_anywhere_in_the_train_split(tmp_path: Path) -> None:
    corpus = small_corpus(tmp_path)
    length = corpus.train_size - 3
    windows = np.lib.stride_tricks.sliding_window_view(corpus.tokens[: corpus.train_size], length + 1)
    assert len(windows) == 3
    batch = corpus.global_batch(seed=0, step=0, batch=64, length=length)
    # The last token is in no window: its target would be of the other split.
    assert {row.tobytes() for row in batch} == {row.astype(np.int32).tobytes() for row in windows[:2]}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_see_different_slices_that_make_up_the_global_batch(world: int) -> None:
    batch = Corpus.of_standard_library().global_batch(seed=1, step=0, batch=12, length=8)
    slices = [rank_slice(batch, rank, world) for rank in range(world)]
    np.testing.assert_array_equal(np.concatenate(slices), batch)
    if world > 1:
        assert (slices[0] != slices[1]).any()


def test_a_batch_that_does_not_divide_over_the_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="divisible by the 4 ranks, got 6"):
        rank_slice(np.zeros((6, 2)), 0, 4)


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="at least 1000 bytes of text, got 6 from 1 files"):
        Corpus.of_files([tmp_path / "tiny.py"])
