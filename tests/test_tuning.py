"""Tuning of language models: tokenizers, chat templates, examples, adapters, runs, generated text, the command line."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tiny_models

import ggrad as gg
from ggrad import models
from ggrad.models import cli, data, lora, tuning

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

CHATML = models.chat.CHATML
TALK = [
    {"role": "user", "content": "Hi there, name three colours!"},
    {"role": "assistant", "content": "Red, green, blue."},
    {"role": "user", "content": "More?\nPlease."},
    {"role": "assistant", "content": "Pink 粉 🙂."},
]
NASTY = [
    "", " ", "  lead", "trail  ", "a\n\n\nb", "\t\tx\r\ny\r", "I'VE don't It's we'LL", "x=1234567890+3.14e-5;",
    "日本語テキスト。漢字仮名",
    "🙂👩\u200d👩\u200d👧 flags 🇩🇪", "no\u00a0break\u2003space", "<|im_start|>user\nhi<|im_end|>",
    "def f(x):\n    return  x + 1  # ok\n", "a" * 70, "abab ab aab", "\x00\x01\x7f", "Ünïcödé ﬁ Straße Привет मानक",
    "http://a.b/c?d=e&f#g", "¿¡«»…—", "CamelCaseHTTPServer", "12 345 6", "\n", " \n \n", "a  b   c    d", "'s 'S ' s",
    "mixed\u200bzero\u200dwidth",
]  # fmt: skip


@pytest.fixture
def path(tmp_path):
    tiny_models.transformer(tmp_path / "m.gguf", "llama", template=CHATML)
    return tmp_path / "m.gguf"


@pytest.fixture
def model(path):
    return models.load(path)


@pytest.fixture
def chats(tmp_path):
    lines = [
        {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "abab" * (i % 3 + 1)}]}
        for i in range(12)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return tmp_path / "chats.jsonl"


def moved(model, seed=2):
    """The model with adapters that change it."""
    model.add_lora(4, alpha=8)
    rng = np.random.default_rng(seed)
    for t in model.lora.matrices.values():
        t.set(0.1 * rng.standard_normal(t.shape))
    return model


# -- tokenizers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pre", ["gpt-2", "smollm", "starcoder", "llama-bpe", "qwen2", "tekken", "gpt-4o", "deepseek-v3"]
)
def test_tokens_are_those_of_llama_cpp(pre, tmp_path):
    pytest.importorskip("xllamacpp")
    tiny_models.transformer(tmp_path / "m.gguf", "llama", tokens=tiny_models.many_tokens(pre))
    tokenizer = models.load(tmp_path / "m.gguf").tokenizer
    llama = tiny_models.Llama(tmp_path / "m.gguf")
    for text in NASTY:
        for special in (True, False):
            theirs = llama.post("/tokenize", {"content": text, "add_special": False, "parse_special": special})
            ours = tokenizer.encode(text, special=special)
            assert ours == theirs["tokens"], (text, special)
            assert tokenizer.decode(ours) == text


@pytest.mark.parametrize("prefix", [True, False])
def test_tokens_of_sentence_piece_are_those_of_llama_cpp(prefix, tmp_path):
    pytest.importorskip("xllamacpp")
    tiny_models.transformer(tmp_path / "m.gguf", "llama", tokens=tiny_models.pieces(prefix))
    tokenizer = models.load(tmp_path / "m.gguf").tokenizer
    llama = tiny_models.Llama(tmp_path / "m.gguf")
    for text in NASTY:
        if "\x00" in text:
            continue  # ends the text there
        theirs = llama.post("/tokenize", {"content": text, "add_special": False, "parse_special": False})
        assert tokenizer.encode(text, special=False) == theirs["tokens"], text


def test_a_character_of_several_tokens_streams_when_it_is_whole(model):
    text = "ab 粉🙂 ok"
    pieces = list(model.tokenizer.stream(iter(model.tokenizer.encode(text))))
    assert "".join(pieces) == text
    assert "粉" in pieces and "🙂" in pieces


def test_a_tokenizer_that_is_not_known_is_refused(model):
    for key, value, says in (
        ("tokenizer.ggml.pre", "mystery", "cuts words by 'mystery'"),
        ("tokenizer.ggml.model", "bert", "of the kind 'bert'"),
        ("tokenizer.ggml.tokens", None, "needs tokenizer.ggml.tokens"),
        ("tokenizer.ggml.merges", ["ab"], "which is no pair"),
        ("tokenizer.ggml.eos_token_id", 5000, "eos_token_id is 5000"),
    ):
        with pytest.raises(gg.errors.FormatError, match=says):
            models.tokenizer.Tokenizer({**model.file.metadata, key: value}).encode("ab")


# -- conversations and examples -----------------------------------------------------------------------------


def test_answers_alone_are_counted_up_to_the_end_of_their_turns(model):
    ids, counted = model.chat.tokens_and_answers(TALK)
    answers = model.tokenizer.decode([i for i, c in zip(ids, counted, strict=True) if c])
    assert answers == "Red, green, blue.<|im_end|>\nPink 粉 🙂.<|im_end|>\n"  # here no single token ends a turn
    assert model.tokenizer.decode(ids) == model.chat.render(TALK)


def test_a_template_is_rendered_as_llama_cpp_does(path, model):
    pytest.importorskip("xllamacpp")
    llama = tiny_models.Llama(path)
    for n in (1, 3):
        theirs = llama.post("/apply-template", {"messages": TALK[:n]})["prompt"]
        assert model.chat.render(TALK[:n], prompt=True) == theirs


def test_a_template_cannot_leave_its_sandbox_and_may_refuse(model):
    for source in (
        "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception('no') }}", "{{ 1 / 'a' }}",
        "{% if %}", "{{ messages[9].content.x }}",
    ):  # fmt: skip
        with pytest.raises(gg.errors.FormatError, match="chat template"):
            models.chat.Chat(model.tokenizer, source).render(TALK)


def test_forms_of_lines_mean_the_same(model, tmp_path):
    forms = [
        {"messages": TALK[:2]},
        {
            "conversations": [
                {"from": "human", "value": TALK[0]["content"]},
                {"from": "gpt", "value": TALK[1]["content"]},
            ]
        },
    ]
    (tmp_path / "d.jsonl").write_text("\n\n".join(map(json.dumps, forms)))
    first, second = data.of_jsonl(tmp_path / "d.jsonl", model.tokenizer, 512).examples
    np.testing.assert_array_equal(first.tokens, second.tokens)
    np.testing.assert_array_equal(first.counted, second.counted)


def test_a_completion_is_counted_and_its_prompt_is_not(model, tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "two and two: ", "completion": "four"}\n{"text": "all of it"}')
    first, second = data.of_jsonl(tmp_path / "d.jsonl", model.tokenizer, 64).examples
    assert model.tokenizer.decode(first.tokens[first.counted]) == "four\0"  # and the end of the text
    assert second.counted.all() and second.tokens[-1] == model.tokenizer.eos
    [whole, _] = data.of_jsonl(tmp_path / "d.jsonl", model.tokenizer, 64, answers_only=False).examples
    assert whole.counted.all()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "is no JSON"),
        ("[1]", "must be an object"),
        ('{"a": 1}', "it has 'a'"),
        ('{"messages": []}', "must be a list of messages"),
        ('{"messages": [{"role": "user"}]}', 'message 0 must have "role" and "content"'),
        ('{"messages": [{"role": "robot", "content": "x"}]}', 'of "robot"'),
        ('{"messages": [{"role": "user", "content": "x"}]}', "the assistant says nothing"),
        ('{"prompt": 1, "completion": "x"}', '"prompt" must be a string'),
    ],
)
def test_a_bad_line_is_named_by_its_number(line, says, model, tmp_path):
    (tmp_path / "d.jsonl").write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(gg.errors.FormatError, match="line 3") as refused:
        data.of_jsonl(tmp_path / "d.jsonl", model.tokenizer, 64)
    assert says in str(refused.value)


def test_what_is_cut_or_left_out_is_counted(model, tmp_path):
    lines = [{"prompt": "p" * 40, "completion": "c"}, {"text": "t" * 40}, {"text": "short"}]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, lines)))
    d = data.of_jsonl(tmp_path / "d.jsonl", model.tokenizer, 16)
    assert (len(d.examples), d.cut, d.dropped) == (2, 2, 1)
    assert all(len(e.tokens) <= 17 for e in d.examples)


def examples(n=9, seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(n):
        length = int(rng.integers(3, 12))
        counted = rng.random(length) < 0.7
        counted[-1] = True
        made.append(data.Example(rng.integers(0, 250, length).astype(np.int32), counted))
    return made


@pytest.mark.parametrize("arch", ["llama", "gpt2", "mamba", "deepseek2, YaRN"])
def test_packed_examples_have_the_loss_that_they_have_alone(arch, tmp_path):
    """No token sees another example: the loss of a row is the mean over the examples' own losses."""
    tiny_models.write(tmp_path / "m.gguf", arch)
    model = moved(models.load(tmp_path / "m.gguf"))
    some = examples()
    losses, counts = [], []
    for e in some:
        logits = model.logits(e.tokens[:-1]).astype(np.float64)
        logp = tiny_models.log_softmax(logits)[np.arange(len(e.tokens) - 1), e.tokens[1:]]
        losses.append(-logp[e.counted[1:]].sum())
        counts.append(int(e.counted[1:].sum()))
    packed = tuning.evaluate(model, some, 32)
    np.testing.assert_allclose(packed, sum(losses) / sum(counts), rtol=2e-6)


def test_every_example_is_in_exactly_one_row_of_each_turn():
    some = examples(31)
    packed = data.Packed(some, context=24, seed=3)
    for turn in range(3):
        assert sorted(i for row in packed.rows(turn) for i in row) == list(range(31))
        assert all(sum(len(some[i].tokens) - 1 for i in row) <= 24 for row in packed.rows(turn))
    assert packed.rows(0) != packed.rows(1)


# -- adapters -----------------------------------------------------------------------------------------------


TUNED = ["llama", "gemma2", "granite", "phi3", "llama, experts", "mamba", "mamba2", "rwkv7", "deepseek2, YaRN"]


@pytest.mark.parametrize("arch", TUNED)
def test_the_loss_in_chunks_has_the_gradients_of_the_plain_one(arch, tmp_path):
    tiny_models.write(tmp_path / "m.gguf", arch)
    model = moved(models.load(tmp_path / "m.gguf"))
    some = examples(3)
    packed = data.Packed(some, context=32, shuffle=False, alone=model.architecture.recurrent)
    loss = tuning.Loss(model, 32, packed.most, chunk=7)
    for leaf, value in zip(loss.inputs, loss.filled(packed.batch(packed.rows(0)[0])), strict=True):
        leaf.set(value)
    graph = gg.Graph().build_forward_expand(loss.value).build_backward_expand()
    graph.compute()
    tokens, targets, positions, cu, _ = loss.inputs
    states, _ = model.states(tokens, positions, cu_seqlens=cu)
    plain = gg.cross_entropy_loss(model.head(states), targets)
    other = gg.Graph().build_forward_expand(plain).build_backward_expand()
    other.compute(backend="reference")
    np.testing.assert_allclose(loss.value.item(), plain.item(), rtol=1e-5)
    for name, t in model.lora.matrices.items():
        wanted = other.grad(t).numpy()
        assert np.linalg.norm(wanted) > 0, name
        off = np.linalg.norm(graph.grad(t).numpy() - wanted) / np.linalg.norm(wanted)
        assert off < 1e-4, name


@pytest.mark.parametrize("arch", ["llama", "qwen3", "phi3", "gpt2"])
def test_an_adapter_does_in_llama_cpp_what_it_does_here(arch, tmp_path, monkeypatch):
    pytest.importorskip("xllamacpp")
    kind, options = tiny_models.TRANSFORMERS[arch]
    path, adapter = tmp_path / "m.gguf", tmp_path / "a.gguf"
    tiny_models.transformer(path, kind, **options)
    model = models.load(path)
    ids = list(b"The quick brown fox jumps over")
    plain = model.logits(ids)
    moved(model).save_adapter(adapter)
    tuned = model.logits(ids)
    assert np.abs(tuned - plain).max() > 0.1
    llama = tiny_models.Llama(path, adapter)
    theirs = np.stack([llama.logp(ids[:n]) for n in (1, 7, 30)])
    tolerance = 3e-3 if arch == "gpt2" else 2e-4  # ggml's gelu is a table of f16
    assert tiny_models.difference(tuned[[0, 6, 29]], theirs) < tolerance

    again = models.load(path)
    again.load_adapter(adapter)
    np.testing.assert_array_equal(again.logits(ids), tuned)


def test_new_adapters_change_nothing_and_bad_ones_are_refused(model):
    ids = list(range(9))
    plain = model.logits(ids)
    model.add_lora(3, rslora=True)
    np.testing.assert_array_equal(model.logits(ids), plain)
    assert model.lora.factor == pytest.approx(6 / 3**0.5)
    for options in ({"rank": 0}, {"alpha": 0.0}, {"dropout": 1.0}, {"targets": ["attn_z"]}):
        with pytest.raises(gg.errors.ShapeError, match="add_lora"):
            model.add_lora(**options)


def test_adapters_that_are_not_of_the_model_are_refused(model, tmp_path):
    adapter, other = tmp_path / "a.gguf", tmp_path / "o.gguf"
    tiny_models.transformer(other, "llama", width=32)
    moved(models.load(other)).save_adapter(adapter)
    with pytest.raises(gg.errors.FormatError, match="must be"):
        model.load_adapter(adapter)
    tiny_models.transformer(other, "qwen3", qk_norm="head")
    moved(models.load(other)).save_adapter(adapter)
    with pytest.raises(gg.errors.FormatError, match="an adapter of a model of qwen3"):
        model.load_adapter(adapter)
    with pytest.raises(gg.errors.FormatError, match=r"general\.type"):
        model.load_adapter(other)
    assert model.lora is None


@pytest.mark.parametrize("arch", ["llama", "qwen2", "phi3", "olmo2"])
def test_peft_s_layout_is_read_back(arch, tmp_path):
    tiny_models.write(tmp_path / "m.gguf", arch)
    model = models.load(tmp_path / "m.gguf")
    model.add_lora(4, alpha=3, rslora=True)
    rng = np.random.default_rng(2)
    for t in model.lora.matrices.values():
        t.set(0.1 * rng.standard_normal(t.shape))
    model.save_adapter(tmp_path / "adapter")
    again = models.load(tmp_path / "m.gguf")
    again.load_adapter(tmp_path / "adapter")
    np.testing.assert_array_equal(again.logits(range(9)), model.logits(range(9)))
    config = tmp_path / "adapter" / "adapter_config.json"
    for change, says in (
        ({"peft_type": "IA3"}, "must be LORA"), ({"use_dora": True}, "use_dora"), ({"r": 5}, "as is said"),
        ({"lora_alpha": "x"}, "positive numbers"),
    ):  # fmt: skip
        whole = json.loads(config.read_text())
        config.write_text(json.dumps({**whole, **change}))
        with pytest.raises(gg.errors.FormatError, match=says):
            again.load_adapter(tmp_path / "adapter")
        config.write_text(json.dumps(whole))


def test_an_adapter_in_peft_does_what_it_does_here(model, tmp_path):
    """The order of rows of queries and keys differs there, and so do the names of everything."""
    torch = pytest.importorskip("torch")
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    c = model.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocabulary, hidden_size=c.width, intermediate_size=c.hidden[0], num_hidden_layers=c.layers,
        num_attention_heads=c.heads[0], num_key_value_heads=c.kv_heads[0], head_dim=c.head_dim, rms_norm_eps=c.eps,
        rope_theta=c.rope.freq_base, rope_parameters={"rope_type": "default", "rope_theta": c.rope.freq_base},
        tie_word_embeddings=True, attn_implementation="eager",
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    names.update(models.peft_layout.NAMES["llama"])
    state = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for i in range(c.layers):
        state.update({f"model.layers.{i}.{their}.weight": f"blk.{i}.{our}.weight" for our, their in names.items()})
    values = {}
    for their, our in state.items():
        value = model.weights[our].numpy()
        if their.endswith(("q_proj.weight", "k_proj.weight")):
            value = value.reshape(-1, c.head_dim // 2, 2, c.width).swapaxes(1, 2).reshape(value.shape)
        values[their] = torch.tensor(value.copy())
    missing = theirs.load_state_dict(values, strict=False)
    assert not missing.unexpected_keys and missing.missing_keys in ([], ["lm_head.weight"])
    theirs.tie_weights()
    ids = list(b"The quick brown fox")

    def logits(m):
        with torch.no_grad():
            return m(input_ids=torch.tensor([ids])).logits[0].numpy()

    plain = model.logits(ids)
    np.testing.assert_allclose(logits(theirs), plain, atol=2e-4)
    moved(model).save_adapter(tmp_path / "adapter")
    tuned = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "adapter")).eval()
    np.testing.assert_allclose(logits(tuned), model.logits(ids), atol=2e-4)
    assert np.abs(model.logits(ids) - plain).max() > 0.1


def test_the_old_file_stays_when_a_new_one_cannot_be_written(model, tmp_path, monkeypatch):
    adapter = tmp_path / "a.gguf"
    moved(model).save_adapter(adapter)
    before = adapter.read_bytes()
    monkeypatch.setattr(lora.Out, "close", lambda self: (_ for _ in ()).throw(OSError("No space left on device")))
    with pytest.raises(OSError, match="No space"):
        model.save_adapter(adapter)
    assert adapter.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["a.gguf", "m.gguf"]


@pytest.mark.parametrize(("dtype", "stored"), [("f32", "f32"), ("q4_0", "q8_0"), ("q8_0", "q8_0")])
def test_a_merged_model_computes_what_the_adapter_does(dtype, stored, tmp_path):
    path, out = tmp_path / "m.gguf", tmp_path / "merged.gguf"
    tiny_models.transformer(path, "llama", dtype=dtype)
    model = moved(models.load(path))
    ids = list(b"The quick brown fox")
    assert model.merge(out) == {stored: 14}
    merged = models.load(out)
    assert merged.file.metadata == model.file.metadata
    changed = set(model.lora.names)
    for name, info in model.file.tensors.items():
        assert merged.file.tensors[name].type == (stored if name in changed else info.type)
        if name not in changed:
            np.testing.assert_array_equal(merged.file.raw(name), model.file.raw(name))
    plain = models.load(path).logits(ids)
    off, effect = np.abs(merged.logits(ids) - model.logits(ids)).max(), np.abs(plain - model.logits(ids)).max()
    assert off < (1e-4 if dtype == "f32" else 0.1) * effect


# -- generated text -----------------------------------------------------------------------------------------


CACHED = ["llama", "llama, YaRN", "gemma3", "gpt2", "qwen3moe", "mamba", "mamba2", "rwkv7", "deepseek2, YaRN"]


@pytest.mark.parametrize("arch", CACHED)
def test_reading_token_by_token_gives_the_logits_of_reading_all(arch, tmp_path):
    """Prompts shorter and longer than a chunk, and windows that have moved on."""
    tiny_models.write(tmp_path / "m.gguf", arch)
    model = models.load(tmp_path / "m.gguf")
    ids = np.random.default_rng(0).integers(0, 256, 100).tolist()
    reader = models.generate.Reader(model, 100)
    for begin, end in ((0, 70), (70, 71), (71, 75), (75, 76), (76, 77), (77, 100)):
        np.testing.assert_allclose(reader.read(ids[begin:end]), model.logits(ids[:end])[-1], atol=2e-4)
    with pytest.raises(gg.errors.ShapeError, match="do not fit"):
        reader.read([1])
    reader.forget()
    np.testing.assert_allclose(reader.read(ids[:5]), model.logits(ids[:5])[-1], atol=2e-4)


def test_the_likeliest_tokens_are_those_of_llama_cpp(path, model):
    pytest.importorskip("xllamacpp")
    llama = tiny_models.Llama(path)
    prompt = "The quick brown"
    theirs = llama.post("/completion", {"prompt": prompt, "n_predict": 24, "temperature": 0, "return_tokens": True})
    ids = model.tokenizer.encode(prompt)
    reader = models.generate.Reader(model, 64)
    ours = list(models.generate.continued(reader, ids, models.Sampling(temperature=0), most=24, ends=set()))
    assert ours[: len(theirs["tokens"])] == theirs["tokens"]
    assert len(theirs["tokens"]) > 3


def test_sampling_keeps_to_its_limits():
    logits = np.log(np.array([0.5, 0.2, 0.15, 0.1, 0.05]))
    rng = np.random.default_rng(0)

    def drawn(**options):
        s = models.Sampling(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **options})
        return {s.choose(logits, [0], rng) for _ in range(300)}

    assert drawn() == {0, 1, 2, 3, 4}
    assert drawn(top_k=2) == {0, 1}
    assert drawn(top_p=0.6) == {0, 1}
    assert drawn(min_p=0.25) == {0, 1, 2}
    assert drawn(temperature=0) == {0}
    assert drawn(temperature=0, repeat_penalty=4.0) == {1}
    for bad in ({"temperature": -1}, {"top_p": 0}, {"min_p": 2}, {"repeat_penalty": 0}, {"top_k": -1}):
        with pytest.raises(gg.errors.ShapeError):
            models.Sampling(**bad)


def test_a_stop_word_ends_the_text_though_it_comes_in_pieces():
    until = models.generate.until
    assert "".join(until(iter(["ab", "c S", "TO", "P d"]), ["STOP"])) == "abc "
    assert "".join(until(iter(["ab", "c S", "TO"]), ["STOP"])) == "abc STO"
    assert "".join(until(iter(["x", "y"]), [])) == "xy"


# -- runs ---------------------------------------------------------------------------------------------------


def run(path, out, *, steps, resume=False, **options):
    model = models.load(path)
    model.add_lora(4, seed=1, dropout=options.pop("dropout", 0.0))
    some = examples(24)
    t = models.Tuning(
        model, some[:20], some[20:], context=32, steps=steps, rows=2, lr=1e-2, out=out, progress=False,
        evaluate_every=2, **options,
    )  # fmt: skip
    if resume:
        t.resume()
    t.ended = t.run()
    return t


def test_a_run_learns_and_its_best_adapter_is_written(path, tmp_path):
    t = run(path, tmp_path / "a.gguf", steps=12)
    rows = (tmp_path / "a.csv").read_text().splitlines()
    assert len(rows) == 13
    assert float(rows[-1].split(",")[1]) < 0.9 * float(rows[1].split(",")[1])
    checked = [float(r.split(",")[-1]) for r in rows[1:] if r.split(",")[-1]]
    assert t.best == min(checked)
    again = models.load(path)
    again.load_adapter(tmp_path / "a.gguf")
    assert tuning.evaluate(again, examples(24)[20:], 32) == pytest.approx(t.best, rel=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(dropout, path, tmp_path):
    whole = run(path, tmp_path / "a.gguf", steps=8, dropout=dropout)
    part = run(path, tmp_path / "b.gguf", steps=8, dropout=dropout, checkpoint_every=1)
    # go back to the fifth step: by stopping there
    model = models.load(path)
    model.add_lora(4, seed=1, dropout=dropout)
    some = examples(24)
    options = dict(context=32, steps=8, rows=2, lr=1e-2, progress=False, evaluate_every=2)
    first = models.Tuning(model, some[:20], some[20:], out=tmp_path / "c.gguf", **options)
    first.trainer.run(5)
    second = run(path, tmp_path / "c.gguf", steps=8, dropout=dropout, resume=True)
    assert second.trainer.step == 8 and second.best == whole.best == part.best
    for name, t in whole.model.lora.matrices.items():
        np.testing.assert_array_equal(second.model.lora.matrices[name].numpy(), t.numpy(), err_msg=name)
    assert (tmp_path / "c.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


def test_checkpoints_of_gradients_give_the_same_bits(path, tmp_path):
    plain = run(path, tmp_path / "a.gguf", steps=3)
    again = run(path, tmp_path / "b.gguf", steps=3, gradient_checkpoints=True)
    for name, t in plain.model.lora.matrices.items():
        np.testing.assert_array_equal(again.model.lora.matrices[name].numpy(), t.numpy())


def test_a_run_ends_when_nothing_gets_better(path, tmp_path):
    model = models.load(path)
    model.add_lora(4)
    some = examples(24)
    t = models.Tuning(
        model, some[:20], some[20:], context=32, steps=50, lr=0.5, out=tmp_path / "a.gguf", progress=False,
        evaluate_every=1, patience=2,
    )  # fmt: skip
    assert t.run() == "patience"
    assert t.trainer.step < 50
    assert (tmp_path / "a.gguf").exists()


def test_the_weights_of_the_model_stay_as_they_were(path, tmp_path):
    before = path.read_bytes()
    t = run(path, tmp_path / "a.gguf", steps=2)
    assert path.read_bytes() == before
    for name in t.model.weights:
        assert t.model.weights[name].role == "constant"


# -- the command line ---------------------------------------------------------------------------------------


def test_the_five_commands(path, chats, tmp_path, capsys):
    adapter, merged = str(tmp_path / "a.gguf"), str(tmp_path / "merged.gguf")
    tune = ["finetune", str(path), "--data", str(chats), "--out", adapter, "--context", "64", "--steps", "6", "--quiet"]
    assert cli.main([*tune, "--rank", "4", "--sample", "hi", "--memory", "2G"]) == 0
    told = capsys.readouterr().out
    for part in (
        "12 examples",
        "1 held out",
        "loss of the held-out examples",
        "a sample after",
        "ggrad merge",
        "memory:",
    ):
        assert part in told, told
    assert cli.main(["generate", str(path), "--lora", adapter, "-p", "ab", "-n", "5", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("ab")
    assert cli.main(["generate", str(path), "--chat", "-p", "ab", "-n", "5"]) == 0
    assert cli.main(["evaluate", str(path), "--lora", adapter, "--data", str(chats), "--context", "64"]) == 0
    assert "perplexity" in capsys.readouterr().out
    assert cli.main(["merge", str(path), "--lora", adapter, "--out", merged]) == 0
    assert cli.main(["info", merged]) == 0
    assert "architecture llama: 2 blocks" in capsys.readouterr().out


def test_a_dry_run_shows_what_is_counted_and_trains_nothing(path, chats, tmp_path, capsys):
    out = tmp_path / "a.gguf"
    assert cli.main(["finetune", str(path), "--data", str(chats), "--out", str(out), "--dry-run", "1"]) == 0
    told = capsys.readouterr().out
    assert "[ab][ab][<]" in told and "say 0" in told
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["finetune", "{path}", "--data", "{none}"], "none.jsonl"),
        (["finetune", "{none}", "--data", "{chats}"], "none.jsonl"),
        (["finetune", "{path}", "--data", "{path}"], "line 1 is no JSON"),
        (["finetune", "{path}", "--text", "{path}"], "is no UTF-8"),
        (["finetune", "{path}", "--data", "{chats}", "--memory", "1M"], "--memory allows 1"),
        (["finetune", "{path}", "--data", "{chats}", "--targets", "attn_z"], "no matrices called attn_z"),
        (["finetune", "{path}", "--data", "{chats}", "--resume"], "adapter.safetensors"),
        (["generate", "{path}"], "give a prompt"),
        (["generate", "{path}", "--lora", "{path}", "-p", "x"], "general.type"),
        (["merge", "{path}", "--lora", "{chats}", "--out", "x.gguf"], "begins with b'GGUF'"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, says, path, chats, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = {"path": path, "chats": chats, "none": tmp_path / "none.jsonl"}
    assert cli.main([a.format(**places) for a in arguments]) == 1
    error = capsys.readouterr().err
    assert says in error and error.startswith("ggrad ") and "Traceback" not in error


def test_ctrl_c_ends_a_run_from_which_another_goes_on(path, chats, tmp_path):
    adapter = tmp_path / "a.gguf"
    command = [sys.executable, "-P", "-m", "ggrad.models.cli", "finetune", str(path), "--data", str(chats)]
    command += ["--out", str(adapter), "--context", "64", "--steps", "100000", "--quiet", "--rank", "4"]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "a.csv"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (log.exists() and log.read_text().count("\n") > 3):
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, error = child.communicate(timeout=120)
    assert child.returncode == 130 and "--resume goes on" in error
    steps = log.read_text().count("\n") - 1
    model = models.load(path)
    model.add_lora(4)
    assert gg.checkpoint.peek(tmp_path / "a.safetensors").step == steps
