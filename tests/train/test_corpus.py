import pytest
import torch

from dyncp.train.corpus import TextCorpus


@pytest.fixture
def folder(tmp_path):
    for path, text in {
        "b.py": b"second",
        "a/x.txt": b"first file",
        "empty.py": b"",
        "one.py": b"1",
        "binary.bin": b"ab\0cd",
        ".hidden": b"hidden",
        ".git/config": b"hidden too",
        "tests/test_x.py": b"a test",
        "lib/site-packages/y.py": b"installed",
        "c.py": bytes(range(1, 256)) * 4,
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(text)
    return tmp_path


def texts(corpus):
    return [
        bytes(sample["input_ids"].tolist()) for sample in (corpus[i] for i in range(len(corpus)))
    ]


def test_documents_are_the_text_files_in_the_order_of_their_paths(folder):
    assert texts(TextCorpus(folder, 6)) == [b"first ", b"second", bytes(range(1, 7))]


def test_a_suffix_selects_files(folder):
    assert texts(TextCorpus(folder, 6, ".py")) == [b"second", bytes(range(1, 7))]


def test_tokens_are_bytes_as_int64(folder):
    tokens = TextCorpus(folder, 10_000)[2]["input_ids"]
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == list(range(1, 256)) * 4


@pytest.mark.parametrize(("name", "text"), [("missing", "not a folder"), ("none", "no text files")])
def test_a_folder_without_documents_is_refused(tmp_path, name, text):
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=text):
        TextCorpus(tmp_path / name, 10)


def test_the_standard_library_is_long_tailed_and_free_of_tests():
    corpus = TextCorpus.standard_library(16_384)
    lengths = torch.tensor([len(corpus[i]["input_ids"]) for i in range(len(corpus))])
    assert len(corpus) > 300
    assert lengths.min() >= 2
    assert lengths.max() == 16_384
    assert (lengths < 8_192).sum() > len(corpus) // 3
    assert not any("test" in file.relative_to(corpus.folder).parts[:-1] for file in corpus.files)
    assert corpus.files == sorted(corpus.files)
