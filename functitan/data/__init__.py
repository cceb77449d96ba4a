"""Data: what a run needs of a source of batches, and the corpus of the standard library."""

from functitan.data.corpus import BYTES, SEPARATOR, Corpus, blank_corpus, decode, encode, load_corpus
from functitan.data.sampler import CorpusSource, ordered_windows, sample_windows, windows
from functitan.data.source import Batch, Source

__all__ = [
    "BYTES",
    "SEPARATOR",
    "Batch",
    "Corpus",
    "CorpusSource",
    "Source",
    "blank_corpus",
    "decode",
    "encode",
    "load_corpus",
    "ordered_windows",
    "sample_windows",
    "windows",
]
