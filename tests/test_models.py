"""Models from GGUF files: logits beside llama.cpp's, weights as they lie in the file, and what is refused."""

import os
import struct
import subprocess
import sys
import warnings

import numpy as np
import pytest
import tiny_models

import ggrad as gg
from ggrad import models
from ggrad.models import architecture, builder

gguf = pytest.importorskip("gguf")

TEXT = list(b"The quick brown fox jumps over the lazy dog and runs away, quite far.")
ENDS = [1, 2, 9, 31, 60]  # tokens of the prefixes: windows of 8 begin to hide something at the third


def in_halves(x):
    """Rounded to f16 and back."""
    return gg.cast(gg.cast(x, dtype=gg.F16), dtype=gg.F32)


@pytest.fixture
def gelu_of_ggml(monkeypatch):
    """ggml looks gelu up in a table of f16 for f16, which is off by up to 5e-4 of its value."""
    exact = gg.ops.gelu
    monkeypatch.setattr(architecture.ops, "gelu", lambda x: in_halves(exact(in_halves(x))))
    monkeypatch.setitem(builder.UNITS, "geglu", lambda x, up: in_halves(exact(in_halves(x))) * up)


@pytest.mark.parametrize("kind", [*tiny_models.TRANSFORMERS, *tiny_models.OTHERS])
def test_logits_are_those_of_llama_cpp(kind, tmp_path, gelu_of_ggml):
    pytest.importorskip("xllamacpp")
    path = tmp_path / "tiny.gguf"
    tiny_models.write(path, kind)
    llama = tiny_models.Llama(path)
    theirs = np.stack([llama.logp(TEXT[:n]) for n in ENDS])
    logits = models.load(path).logits(TEXT)
    assert tiny_models.difference(logits[[n - 1 for n in ENDS]], theirs) < 2e-4


def test_every_architecture_is_compared():
    kinds = {kind.partition(",")[0] for kind in (*tiny_models.TRANSFORMERS, *tiny_models.OTHERS)}
    assert {kind for kind in models.ARCHITECTURES if kind not in kinds} == set()


def test_a_batch_gives_what_each_of_its_rows_gives(tmp_path):
    tiny_models.transformer(tmp_path / "m.gguf", "llama")
    model = models.load(tmp_path / "m.gguf")
    rows = np.array([TEXT[:9], TEXT[9:18]])
    both = model.logits(rows)
    assert both.shape == (2, 9, tiny_models.VOCABULARY)
    for row, logits in zip(rows, both, strict=True):
        np.testing.assert_allclose(model.logits(row), logits, atol=1e-5)


def test_weights_lie_in_the_file_and_are_not_copied(tmp_path):
    tiny_models.transformer(tmp_path / "m.gguf", "llama", dtype="q8_0")
    model = models.load(tmp_path / "m.gguf")
    w = model.weights["blk.0.ffn_up.weight"]
    assert w.dtype is gg.Q8_0
    assert np.shares_memory(w.memory(), model.file.raw(w.name))
    assert not w.memory().flags.writeable


@pytest.mark.parametrize("dtype", ["q4_0", "q8_0", "bf16", "f16", "mxfp4", "tq1_0", "tq2_0"])
def test_every_type_is_read_as_gguf_decodes_it(dtype, tmp_path):
    """mxfp4, tq1_0 and tq2_0 are types that products do not read: they are expanded, and a warning says so."""
    path = tmp_path / "m.gguf"
    tiny_models.transformer(path, "llama", dtype=dtype, width=256, hidden=512, layers=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = models.load(path)
    expanded = dtype in ("mxfp4", "tq1_0", "tq2_0")
    assert [
        str(w.message) for w in said if "expanded to f32" in str(w.message) and dtype in str(w.message)
    ] or not expanded
    assert bool(model.weights.expanded) == expanded
    for t in gguf.GGUFReader(path).tensors:
        wanted = np.asarray(gguf.quants.dequantize(t.data, t.tensor_type), np.float32)
        np.testing.assert_array_equal(model.weights[t.name].numpy().astype(np.float32), wanted, err_msg=t.name)
    assert np.isfinite(model.logits(TEXT[:5])).all()


def changed(path, key: str, value: int) -> None:
    """Another value of a whole number in the metadata, in place."""
    raw = bytearray(path.read_bytes())
    name = key.encode()
    at = raw.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    kind = struct.unpack_from("<I", raw, at)[0]
    assert kind == 4  # u32
    struct.pack_into("<I", raw, at + 4, value)
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("llama.block_count", 0, "block_count must be at least 1"),
        ("llama.block_count", 3, "there is no tensor 'blk.2"),
        ("llama.block_count", 1, "no use for these tensors: blk.1"),
        ("llama.attention.head_count", 3, "which does not divide 3 heads"),
        ("llama.attention.head_count_kv", 0, "does not divide"),
        ("llama.attention.key_length", 16, "must be [64, 64]"),
        ("llama.embedding_length", 32, "its rows must have 32 elements"),
    ],
)
def test_metadata_that_do_not_fit_the_tensors_are_refused(key, value, says, tmp_path):
    path = tmp_path / "m.gguf"
    tiny_models.transformer(path, "llama")
    changed(path, key, value)
    with pytest.raises(gg.errors.FormatError) as refused:
        models.load(path)
    assert says in str(refused.value) and str(path) in str(refused.value)


def test_an_architecture_that_is_not_known_is_named(tmp_path):
    path = tmp_path / "m.gguf"
    tiny_models.transformer(path, "falcon")
    with pytest.raises(gg.errors.FormatError, match="its architecture is 'falcon'; ggrad knows llama, qwen2"):
        models.load(path)


def test_tokens_that_the_vocabulary_lacks_are_refused(tmp_path):
    tiny_models.transformer(tmp_path / "m.gguf", "llama")
    model = models.load(tmp_path / "m.gguf")
    for tokens in ([], [257], [-1], [0.5], [[[1]]]):
        with pytest.raises(gg.errors.ShapeError):
            model.logits(tokens)


def test_a_cut_or_changed_file_is_refused_and_never_ends_the_process(tmp_path):
    """200 files with a byte of the header changed: each gives a model or an error of ours."""
    path, bad = tmp_path / "m.gguf", tmp_path / "bad.gguf"
    tiny_models.transformer(path, "llama")
    whole = path.read_bytes()
    header = whole.index(b"output_norm.weight")
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(200):
        raw = bytearray(whole)
        raw[rng.integers(0, 400) if rng.random() < 0.5 else rng.integers(0, header)] = rng.integers(0, 256)
        bad.write_bytes(raw if rng.random() < 0.9 else raw[: rng.integers(0, len(raw))])
        try:
            models.load(bad)
        except gg.errors.GgradError:
            refused += 1
    assert refused > 50


def test_models_come_with_the_package_and_bring_no_other_until_needed():
    code = "import sys, ggrad; ggrad.models.load; print(*sorted({n.partition('.')[0] for n in sys.modules}))"
    loaded = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, env={**os.environ}
    ).stdout.split()
    assert not {"gguf", "tokenizers", "jinja2", "tqdm", "safetensors", "numba"} & set(loaded)


def test_rows_are_written_into_halves_too():
    leaf = gg.tensor(np.zeros((2, 5, 3), np.float16))
    rows = np.random.default_rng(0).standard_normal((2, 2, 3)).astype(np.float32)
    written = gg.assign_rows(leaf, gg.tensor(rows), gg.tensor(np.array([4, 1], np.int32)))
    gg.Graph().build_forward_expand(written).compute()
    np.testing.assert_array_equal(leaf.numpy()[:, [4, 1]], rows.astype(np.float16))
    assert not leaf.numpy()[:, [0, 2, 3]].any()
