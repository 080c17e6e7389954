"""Tiny random models of every architecture as GGUF files, and what llama.cpp makes of a file: for tests of models."""

import json
import urllib.request

import numpy as np

VOCABULARY = 257


def byte_tokens() -> list[str]:
    """GPT-2's characters for bytes, and one token more, since a file needs a merge."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)] + ["ab"]


def many_tokens(pre: str) -> dict:
    """Byte-level BPE whose merges make whole words, runs of spaces and digits, so that it shows where text was cut."""
    tokens = byte_tokens()[:256]
    merges, known = [], set(tokens)
    words = "Ġa Ġb ĠI return def user hi aaaa ĠĠĠĠ ĊĊ ĊĠ 123 1234 456 ab abab ĠĊ čĊ 'S 's 've don't it ĠIt HTTP"
    more = "Server Camel Case ĠŃ æĹ¥ æľ¬ èª ðŁ ðŁĻ ÐŁ ÑĢ ĠĠa .b /c :// =e +3"
    for word in f"{words} {more}".split():
        whole = word[0]
        for c in word[1:]:
            if c in known and whole in known and whole + c not in known:
                merges.append(f"{whole} {c}")
                tokens.append(whole + c)
                known.add(whole + c)
            whole += c
    types = [1] * len(tokens)
    for special in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        tokens.append(special)
        types.append(3)
    return {"model": "gpt2", "pre": pre, "tokens": tokens, "types": types, "merges": merges}


def pieces(prefix: bool) -> dict:
    """SentencePiece's kind: scores say which pair is merged first; what has no piece is told in bytes."""
    tokens, types = ["<unk>", "<s>", "</s>"], [2, 3, 3]
    tokens += [f"<0x{b:02X}>" for b in range(256)]
    types += [6] * 256
    words = "▁a ▁b ab abab aba aa aaaa ▁I ▁It It don on ▁▁ ▁▁▁▁ re ret retu return turn tu 12 123 23 日本 本語 ▁hi"
    letters = sorted(set("▁" + "abcdefghijklmnopqrstuvwxyzI0123456789日本語.,:<|>_'\n" + "".join(words.split())))
    more = [w for w in dict.fromkeys([*letters, *words.split()]) if w]
    tokens += more
    types += [1] * len(more)
    scores = [0.0] * 259 + [-float(i) for i in range(len(more))]
    return {"model": "llama", "tokens": tokens, "types": types, "scores": scores, "prefix": prefix}


class Writer:
    """gguf's writer with random tensors."""

    def __init__(self, path, arch: str, seed: int = 1, dtype: str = "f32") -> None:
        import gguf

        self.gguf, self.arch, self.dtype = gguf, arch, dtype
        self.rng = np.random.default_rng(seed)
        self.w = gguf.GGUFWriter(path, arch=arch)

    def matrix(self, name: str, *shape: int) -> None:
        value = (self.rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        kind = getattr(self.gguf.GGMLQuantizationType, self.dtype.upper())
        if self.dtype == "f32" or shape[-1] % self.gguf.GGML_QUANT_SIZES[kind][0]:
            self.w.add_tensor(name + ".weight", value)
        else:
            self.w.add_tensor(name + ".weight", self.gguf.quants.quantize(value, kind), raw_dtype=kind)

    def vector(self, name: str, n: int, mean: float = 1.0) -> None:
        self.w.add_tensor(name, (mean + 0.3 * self.rng.standard_normal(n)).astype(np.float32))

    def tokenizer(self, template: str | None = None) -> None:
        w = self.w
        w.add_vocab_size(VOCABULARY)
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre("gpt-2")
        w.add_token_list(byte_tokens())
        w.add_token_types([1] * VOCABULARY)
        w.add_token_merges(["a b"])
        w.add_bos_token_id(0)
        w.add_eos_token_id(0)
        if template:
            w.add_chat_template(template)

    def tokenizer_of(self, tokens: dict) -> None:
        """Any tokenizer: see `many_tokens` and `pieces`."""
        w = self.w
        w.add_vocab_size(len(tokens["tokens"]))
        w.add_tokenizer_model(tokens["model"])
        w.add_token_list(tokens["tokens"])
        w.add_token_types(tokens["types"])
        if "pre" in tokens:
            w.add_tokenizer_pre(tokens["pre"])
            w.add_token_merges(tokens["merges"])
        else:
            w.add_tokenizer_pre("default")
            w.add_token_scores(tokens["scores"])
            w.add_add_space_prefix(tokens["prefix"])
            w.add_unk_token_id(0)
        w.add_bos_token_id(1)
        w.add_eos_token_id(2)

    def close(self) -> None:
        self.w.write_header_to_file()
        self.w.write_kv_data_to_file()
        self.w.write_tensors_to_file()
        self.w.close()


def transformer(
    path, arch: str, *, layers=2, width=64, heads=4, kv_heads=2, head_dim=32, hidden=96, experts=0, used=0, window=0,
    softcaps=None, bias=False, qk_norm="", before=True, after=False, norm="rms", fused=False, gate=True, tied=True,
    positions=False, rope_freqs=False, factors=False, numbers=None, strings=None, dtype="f32", template=None, seed=1,
    context=256, tokens=None,
):  # fmt: skip
    """Writes a transformer; `numbers` and `strings` are further metadata under the architecture's prefix."""
    t = Writer(path, arch, seed, dtype)
    w = t.w
    w.add_block_count(layers)
    w.add_context_length(context)
    w.add_embedding_length(width)
    w.add_feed_forward_length(hidden)
    w.add_head_count(heads)
    w.add_head_count_kv(kv_heads)
    w.add_key_length(head_dim)
    w.add_value_length(head_dim)
    if norm == "rms":
        w.add_layer_norm_rms_eps(1e-5)
    else:
        w.add_layer_norm_eps(1e-5)
    if not positions:
        w.add_rope_dimension_count(head_dim)
        w.add_rope_freq_base(50000.0)
    if experts:
        w.add_expert_count(experts)
        w.add_expert_used_count(used)
        w.add_expert_feed_forward_length(hidden)
    if window:
        w.add_sliding_window(window)
    if softcaps:
        w.add_attn_logit_softcapping(softcaps[0])
        w.add_final_logit_softcapping(softcaps[1])
    for key, value in (numbers or {}).items():
        (w.add_uint32 if isinstance(value, int) else w.add_float32)(f"{arch}.{key}", value)
    for key, value in (strings or {}).items():
        w.add_string(f"{arch}.{key}", value)
    t.tokenizer(template) if tokens is None else t.tokenizer_of(tokens)
    vocabulary = VOCABULARY if tokens is None else len(tokens["tokens"])

    def normed(name: str, n: int) -> None:
        t.vector(name + ".weight", n)
        if norm == "layer":
            t.vector(name + ".bias", n, 0.0)

    def linear(name: str, rows: int, columns: int, biased: bool = bias) -> None:
        t.matrix(name, rows, columns)
        if biased:
            t.vector(name + ".bias", rows, 0.0)

    t.matrix("token_embd", vocabulary, width)
    if positions:
        t.matrix("position_embd", context, width)
    if not tied:
        t.matrix("output", vocabulary, width)
    normed("output_norm", width)
    if rope_freqs:
        w.add_tensor("rope_freqs.weight", np.linspace(1, 8, head_dim // 2).astype(np.float32))
    if factors:
        w.add_tensor("rope_factors_long.weight", np.linspace(1, 8, head_dim // 2).astype(np.float32))
        w.add_tensor("rope_factors_short.weight", np.linspace(1, 1.5, head_dim // 2).astype(np.float32))
    everywhere = bias and norm == "layer"
    for i in range(layers):
        n = f"blk.{i}."
        if before:
            normed(n + "attn_norm", width)
            normed(n + "ffn_norm", width)
        if fused:
            linear(n + "attn_qkv", (heads + 2 * kv_heads) * head_dim, width)
        else:
            for which, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                linear(f"{n}attn_{which}", rows * head_dim, width)
        linear(n + "attn_output", width, heads * head_dim, everywhere)
        if qk_norm:
            t.vector(n + "attn_q_norm.weight", head_dim * (heads if qk_norm == "whole" else 1))
            t.vector(n + "attn_k_norm.weight", head_dim * (kv_heads if qk_norm == "whole" else 1))
        if after:
            normed(n + "post_attention_norm", width)
            normed(n + "post_ffw_norm", width)
        if experts:
            t.matrix(n + "ffn_gate_inp", experts, width)
            t.matrix(n + "ffn_gate_exps", experts, hidden, width)
            t.matrix(n + "ffn_up_exps", experts, hidden, width)
            t.matrix(n + "ffn_down_exps", experts, width, hidden)
            continue
        if gate and not fused:
            linear(n + "ffn_gate", hidden, width, everywhere)
        linear(n + "ffn_up", hidden * (2 if gate and fused else 1), width, everywhere)
        linear(n + "ffn_down", width, hidden, everywhere)
    t.close()


OLMO = {"tied": False, "before": False, "after": True, "qk_norm": "whole", "head_dim": 16}
TRANSFORMERS = {  # where they can, heads are not of width / heads elements, which finds more mistakes
    "llama": ("llama", {}),
    "llama, not tied, multi-head": ("llama", {"tied": False, "kv_heads": 4}),
    "llama 3, frequency factors": ("llama", {"rope_freqs": True}),
    "llama, linear scaling": (
        "llama", {"numbers": {"rope.scaling.factor": 4.0}, "strings": {"rope.scaling.type": "linear"}},
    ),
    "llama, YaRN": (
        "llama",
        {
            "numbers": {"rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
            "strings": {"rope.scaling.type": "yarn"},
        },
    ),
    "llama, experts": ("llama", {"experts": 6, "used": 2}),
    "mistral, its window as llama.cpp reads it": ("llama", {"window": 8}),
    "qwen2": ("qwen2", {"bias": True, "head_dim": 16}),
    "qwen3": ("qwen3", {"qk_norm": "head"}),
    "qwen3moe": ("qwen3moe", {"qk_norm": "head", "experts": 8, "used": 3}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"after": True, "window": 8, "softcaps": (5.0, 3.0)}),
    "gemma3": ("gemma3", {"after": True, "qk_norm": "head", "window": 8, "layers": 7}),
    "phi3": ("phi3", {"fused": True, "tied": False, "head_dim": 16}),
    "phi3, factors": (
        "phi3",
        {
            "fused": True, "tied": False, "factors": True, "head_dim": 16,
            "numbers": {"rope.scaling.original_context_length": 16},
        },
    ),
    "smollm3": ("smollm3", {"layers": 5}),
    "granite": (
        "granite",
        {"numbers": {"attention.scale": 0.2, "embedding_scale": 6.0, "residual_scale": 0.3, "logit_scale": 2.0}},
    ),
    "olmo2": ("olmo2", OLMO),
    "olmo2, window": (
        "olmo2", {**OLMO, "window": 8, "layers": 5},
    ),
    "gpt2": (
        "gpt2",
        {"norm": "layer", "bias": True, "fused": True, "gate": False, "positions": True, "kv_heads": 4, "head_dim": 16},
    ),
    "starcoder2": ("starcoder2", {"norm": "layer", "bias": True, "gate": False, "head_dim": 16}),
}  # fmt: skip


def mamba(path, *, layers=2, width=32, size=16, rank=4, kernel=4, normed=False):
    inner = 2 * width
    t = Writer(path, "mamba")
    w = t.w
    w.add_block_count(layers)
    w.add_context_length(256)
    w.add_embedding_length(width)
    w.add_feed_forward_length(0)
    w.add_head_count(0)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_ssm_conv_kernel(kernel)
    w.add_ssm_inner_size(inner)
    w.add_ssm_state_size(size)
    w.add_ssm_time_step_rank(rank)
    w.add_ssm_dt_b_c_rms(normed)
    t.tokenizer()
    t.matrix("token_embd", VOCABULARY, width)
    t.vector("output_norm.weight", width)
    for i in range(layers):
        n = f"blk.{i}."
        t.vector(n + "attn_norm.weight", width)
        t.matrix(n + "ssm_in", 2 * inner, width)
        t.matrix(n + "ssm_conv1d", inner, kernel)
        t.vector(n + "ssm_conv1d.bias", inner, 0.0)
        t.matrix(n + "ssm_x", rank + 2 * size, inner)
        t.matrix(n + "ssm_dt", inner, rank)
        t.vector(n + "ssm_dt.bias", inner, 0.0)
        w.add_tensor(n + "ssm_a", -np.exp(t.rng.standard_normal((inner, size))).astype(np.float32))
        t.vector(n + "ssm_d", inner)
        t.matrix(n + "ssm_out", width, inner)
    t.close()


def mamba2(path, *, layers=2, width=32, size=16, heads=8, groups=2, kernel=4):
    inner = 2 * width
    mixed = inner + 2 * groups * size
    t = Writer(path, "mamba2")
    w = t.w
    w.add_block_count(layers)
    w.add_context_length(256)
    w.add_embedding_length(width)
    w.add_feed_forward_length(0)
    w.add_head_count(0)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_ssm_conv_kernel(kernel)
    w.add_ssm_inner_size(inner)
    w.add_ssm_state_size(size)
    w.add_ssm_time_step_rank(heads)
    w.add_ssm_group_count(groups)
    t.tokenizer()
    t.matrix("token_embd", VOCABULARY, width)
    t.vector("output_norm.weight", width)
    for i in range(layers):
        n = f"blk.{i}."
        t.vector(n + "attn_norm.weight", width)
        t.matrix(n + "ssm_in", inner + mixed + heads, width)
        t.matrix(n + "ssm_conv1d", mixed, kernel)
        t.vector(n + "ssm_conv1d.bias", mixed, 0.0)
        t.vector(n + "ssm_dt.bias", heads, 0.0)
        w.add_tensor(n + "ssm_a", -np.exp(t.rng.standard_normal((heads, 1))).astype(np.float32))
        w.add_tensor(n + "ssm_d", t.rng.standard_normal((heads, 1)).astype(np.float32))
        w.add_tensor(n + "ssm_norm.weight", (1 + 0.3 * t.rng.standard_normal((groups, inner // groups))).astype("f4"))
        t.matrix(n + "ssm_out", width, inner)
    t.close()


def deepseek2(
    path, *, layers=3, width=64, heads=4, latent=32, turned=16, plain=24, value=20, q_rank=0, dense=1, hidden=96,
    experts=6, used=2, small=48, shared=1, gate=1, normalized=False, factor=1.5, yarn=False, separate=False,
):  # fmt: skip
    t = Writer(path, "deepseek2")
    w = t.w
    w.add_block_count(layers)
    w.add_context_length(256)
    w.add_embedding_length(width)
    w.add_feed_forward_length(hidden)
    w.add_head_count(heads)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_dimension_count(turned)
    w.add_rope_freq_base(10000.0)
    w.add_kv_lora_rank(latent)
    if q_rank:
        w.add_q_lora_rank(q_rank)
    w.add_head_count_kv(1 if separate else heads)
    w.add_key_length(latent + turned if separate else plain + turned)
    w.add_value_length(latent if separate else value)
    if separate:
        w.add_key_length_mla(plain + turned)
        w.add_value_length_mla(value)
    w.add_leading_dense_block_count(dense)
    w.add_expert_count(experts)
    w.add_expert_used_count(used)
    w.add_expert_shared_count(shared)
    w.add_expert_feed_forward_length(small)
    w.add_expert_weights_scale(factor)
    w.add_expert_weights_norm(normalized)
    w.add_uint32("deepseek2.expert_gating_func", gate)
    if yarn:
        w.add_string("deepseek2.rope.scaling.type", "yarn")
        w.add_float32("deepseek2.rope.scaling.factor", 4.0)
        w.add_uint32("deepseek2.rope.scaling.original_context_length", 16)
        w.add_float32("deepseek2.rope.scaling.yarn_log_multiplier", 0.0707)
    t.tokenizer()
    t.matrix("token_embd", VOCABULARY, width)
    t.matrix("output", VOCABULARY, width)
    t.vector("output_norm.weight", width)
    for i in range(layers):
        n = f"blk.{i}."
        t.vector(n + "attn_norm.weight", width)
        t.vector(n + "ffn_norm.weight", width)
        if q_rank:
            t.matrix(n + "attn_q_a", q_rank, width)
            t.vector(n + "attn_q_a_norm.weight", q_rank)
            t.matrix(n + "attn_q_b", heads * (plain + turned), q_rank)
        else:
            t.matrix(n + "attn_q", heads * (plain + turned), width)
        t.matrix(n + "attn_kv_a_mqa", latent + turned, width)
        t.vector(n + "attn_kv_a_norm.weight", latent)
        if separate:
            t.matrix(n + "attn_k_b", heads, latent, plain)
            t.matrix(n + "attn_v_b", heads, value, latent)
        else:
            t.matrix(n + "attn_kv_b", heads * (plain + value), latent)
        t.matrix(n + "attn_output", width, heads * value)
        sizes = [("", hidden)] if i < dense else [("_shexp", small * shared)]
        for ending, rows in sizes:
            t.matrix(f"{n}ffn_gate{ending}", rows, width)
            t.matrix(f"{n}ffn_up{ending}", rows, width)
            t.matrix(f"{n}ffn_down{ending}", width, rows)
        if i >= dense:
            t.matrix(n + "ffn_gate_inp", experts, width)
            if gate == 2:
                w.add_tensor(n + "exp_probs_b.bias", (0.3 * t.rng.standard_normal(experts)).astype(np.float32))
            t.matrix(n + "ffn_gate_exps", experts, small, width)
            t.matrix(n + "ffn_up_exps", experts, small, width)
            t.matrix(n + "ffn_down_exps", experts, width, small)
    t.close()


def rwkv7(path, *, layers=3, width=128, size=64, hidden=96, decay=12, rate=8, mix=10, gate=14):
    """Heads are of 64 elements: of others llama.cpp computes something else, and each time something new."""
    t = Writer(path, "rwkv7")
    w = t.w
    w.add_block_count(layers)
    w.add_context_length(256)
    w.add_embedding_length(width)
    w.add_feed_forward_length(hidden)
    w.add_head_count(0)
    w.add_layer_norm_eps(1e-5)
    w.add_token_shift_count(2)
    w.add_wkv_head_size(size)
    w.add_decay_lora_rank(decay)
    w.add_iclr_lora_rank(rate)
    w.add_value_residual_mix_lora_rank(mix)
    w.add_gate_lora_rank(gate)
    t.tokenizer()

    def normed(name: str) -> None:
        t.vector(name + ".weight", width)
        t.vector(name + ".bias", width, 0.0)

    t.matrix("token_embd", VOCABULARY, width)
    t.matrix("output", VOCABULARY, width)
    normed("token_embd_norm")
    normed("output_norm")
    for i in range(layers):
        n = f"blk.{i}."
        normed(n + "attn_norm")
        normed(n + "attn_norm_2")
        shares = t.rng.random((6, 1, 1, width)).astype(np.float32)
        w.add_tensor(n + "time_mix_lerp_fused.weight", shares)
        for name, rank in (("w", decay), ("a", rate), ("v", mix if i else rate)):
            t.vector(f"{n}time_mix_{name}0.weight", width, 0.0)
            t.matrix(f"{n}time_mix_{name}1", rank, width)
            t.matrix(f"{n}time_mix_{name}2", width, rank)
        t.matrix(n + "time_mix_g1", gate, width)
        t.matrix(n + "time_mix_g2", width, gate)
        for name in ("k_k", "k_a"):
            t.vector(f"{n}time_mix_{name}.weight", width)
        w.add_tensor(n + "time_mix_r_k.weight", (0.3 * t.rng.standard_normal(width)).astype(np.float32))
        for name in ("key", "value", "receptance", "output"):
            t.matrix(f"{n}time_mix_{name}", width, width)
        normed(n + "time_mix_ln")
        w.add_tensor(n + "channel_mix_lerp_k.weight", t.rng.random((1, 1, width)).astype(np.float32))
        t.matrix(n + "channel_mix_key", hidden, width)
        t.matrix(n + "channel_mix_value", width, hidden)
    t.close()


OTHERS = {
    "rwkv7": (rwkv7, {}),
    "mamba": (mamba, {}),
    "mamba, normed parts": (mamba, {"normed": True}),
    "mamba2": (mamba2, {}),
    "deepseek2, lite": (deepseek2, {"layers": 27, "width": 32}),  # llama.cpp knows it by the number of its blocks
    "deepseek2, YaRN": (deepseek2, {"q_rank": 24, "yarn": True}),
    "deepseek2, short queries, sigmoid": (deepseek2, {"q_rank": 24, "gate": 2, "normalized": True}),
    "deepseek2, a matrix for each head": (deepseek2, {"separate": True, "q_rank": 24}),
}


def write(path, kind: str, **more) -> None:
    """A model of either table."""
    if kind in OTHERS:
        writer, options = OTHERS[kind]
        writer(path, **{**options, **more})
    else:
        arch, options = TRANSFORMERS[kind]
        transformer(path, arch, **{**options, **more})


class Llama:
    """A model as llama.cpp runs it on one thread: exact attention, and a cache of f32."""

    def __init__(self, path, adapter=None) -> None:
        import xllamacpp

        p = xllamacpp.CommonParams()
        p.model.path, p.n_ctx, p.n_parallel, p.warmup, p.fit_params = str(path), 256, 1, False, False
        p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
        p.flash_attn_type = xllamacpp.llama_flash_attn_type(0)
        p.cache_type_k = p.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        if adapter:
            lora = xllamacpp.CommonAdapterLoraInfo()
            lora.path, lora.scale = str(adapter), 1.0
            p.lora_adapters = [lora]
        self._server = xllamacpp.Server(p)

    def post(self, endpoint: str, body: dict) -> dict:
        request = urllib.request.Request(
            self._server.listening_address + endpoint, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def logp(self, ids: list[int], vocabulary: int = VOCABULARY, plain_token: int = 65) -> np.ndarray:
        """Log probabilities [vocabulary] of the next token, off by a constant that its server adds.

        The bias on a plain token shows in none of them; at an end of text there would be none.
        """
        answer = self.post(
            "/completion",
            {
                "prompt": ids, "n_predict": 1, "n_probs": vocabulary, "temperature": 0, "cache_prompt": False,
                "logit_bias": [[plain_token, 1000.0]],
            },
        )  # fmt: skip
        found = np.full(vocabulary, np.nan)
        for t in answer["completion_probabilities"][0]["top_logprobs"]:
            found[t["id"]] = t["logprob"]
        return found


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def difference(logits: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference of log probabilities [positions, vocabulary] that is no constant of its position."""
    d = log_softmax(logits) - theirs
    return float(np.abs(d - np.median(d, axis=-1, keepdims=True)).max())
