"""Trains a language model of Kimi Delta Attention on bytes, and lets it write token by token from its states.

    python kda_lm.py                       # two minutes on two cores
    python kda_lm.py --context 512 --batch 2 --out long

The model is that of train_gpt.py, and takes its options, but its layers remember in states of a fixed size.  While it
trains they are computed in chunks, in time that grows with the context and not with its square.  To write, it goes on
from the states of the token before: each token costs the same, however long the text is, and there is no window that
ends.  Both forms give the same logits.
"""

import sys
from pathlib import Path

import numpy as np

import ggrad as gg

sys.path.append(str(Path(__file__).parent))
from train_gpt import BYTES, GPT, main

TAPS = 4  # tokens that a short convolution sees


class Memory:
    """What the layers remember from one call to the next: leaves that a graph reads, and what replaces their values."""

    def __init__(self) -> None:
        self._leaves: dict[str, gg.Tensor] = {}
        self._next: dict[str, gg.Tensor] = {}

    def recall(self, name: str, *shape: int) -> gg.Tensor:
        """Zeros at first."""
        self._leaves[name] = gg.tensor(np.zeros(shape), name=name)
        return self._leaves[name]

    def keep(self, name: str, value: gg.Tensor) -> None:
        self._next[name] = value

    @property
    def results(self) -> list[gg.Tensor]:
        return list(self._next.values())

    def move_on(self) -> None:
        """After a run: what it kept is what the next one recalls."""
        for name, value in self._next.items():
            self._leaves[name].set(value.numpy())


class DeltaLM(GPT):
    """The parameters, and the graphs made of them: in chunks, or with a memory token by token."""

    def logits(self, tokens: gg.Tensor, memory: Memory | None = None) -> gg.Tensor:
        """[batch, tokens, 256] from i32 [batch, tokens]."""
        p = self.params
        x = gg.get_rows(p["embedding"], tokens)  # [batch, tokens, width]
        for i in range(self.config.layers):
            x = x + self._delta_attention(i, gg.rms_norm(x, p[f"{i}.attention.norm"]), memory)
            x = x + self._mlp(i, gg.rms_norm(x, p[f"{i}.mlp.norm"]))
        return gg.mul_mat(p["head"], gg.rms_norm(x, p["norm"]))

    def _attention_parameters(self, i: int) -> None:
        width, heads = self.config.width, self.config.heads
        name = f"{i}.attention"
        for what in "qkv":
            self._matrix(f"{name}.{what}", width, width)
            self._matrix(f"{name}.{what}.taps", TAPS, width, scale=TAPS**-0.5)
        for what in ("decay", "gate"):  # through a bottleneck of the size of a head
            self._matrix(f"{name}.{what}.down", width // heads, width)
            self._matrix(f"{name}.{what}.up", width, width // heads)
        self._matrix(f"{name}.beta", heads, width)
        self._vector(f"{name}.A_log", np.log(self._rng.uniform(1, 16, heads)))
        dt = np.exp(self._rng.uniform(np.log(1e-3), np.log(1e-1), width))
        self._vector(f"{name}.dt_bias", np.log(np.expm1(dt)))  # softplus of it is dt
        self._ones(f"{name}.out_norm", width // heads)
        self._matrix(f"{name}.out", width, width)

    def _delta_attention(self, i: int, x: gg.Tensor, memory: Memory | None) -> gg.Tensor:
        p, name, heads = self.params, f"{i}.attention", self.config.heads
        batch, length, width = x.shape
        shape = (batch, length, heads, width // heads)

        def bottleneck(what: str) -> gg.Tensor:
            return gg.mul_mat(p[f"{name}.{what}.up"], gg.mul_mat(p[f"{name}.{what}.down"], x)).reshape(shape)

        q, k, v = (self._convolved(f"{name}.{what}", x, memory).reshape(shape) for what in "qkv")
        inputs = q, k, v, bottleneck("decay"), gg.mul_mat(p[f"{name}.beta"], x)
        options = {"A_log": p[f"{name}.A_log"], "dt_bias": p[f"{name}.dt_bias"]} | dict.fromkeys(
            ["use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"], True
        )
        if memory is None:
            o = gg.kda(*inputs, **options)  # [batch, tokens, heads, d]
        else:
            state = memory.recall(name, batch, heads, shape[3], shape[3])
            o, state = gg.kda_recurrent(*inputs, **options, initial_state=state, output_final_state=True)
            memory.keep(name, state)
        o = gg.rms_norm(o, p[f"{name}.out_norm"]) * gg.sigmoid(bottleneck("gate"))
        return gg.mul_mat(p[f"{name}.out"], o.reshape(batch, length, width))

    def _convolved(self, name: str, x: gg.Tensor, memory: Memory | None) -> gg.Tensor:
        """A product with x, then in every channel a weighted sum of this token and the three before it; silu."""
        y, taps = gg.mul_mat(self.params[name], x), self.params[f"{name}.taps"]
        batch, length, width = y.shape
        if memory is None:
            y = gg.pad(y, left=(0, TAPS - 1, 0), right=(0, 0, 0))
        else:
            y = gg.concat(memory.recall(name, batch, TAPS - 1, width), y, axis=1)
            memory.keep(name, gg.cont(y[:, length:]))
        total = y[:, :length] * taps[0]
        for j in range(1, TAPS):
            total = total + y[:, j : j + length] * taps[j]
        return gg.silu(total)

    def _vector(self, name: str, values: np.ndarray) -> None:
        self.params[name] = gg.tensor(values, name=name, param=True)


class Writer:
    """The model token by token."""

    def __init__(self, model: DeltaLM, threads: int | None) -> None:
        self.threads, self.memory = threads, Memory()
        self.token = gg.tensor(shape=(1, 1), dtype=gg.I32, name="token")
        self.logits = model.logits(self.token, self.memory)
        self.graph = gg.Graph().build_forward_expand(self.logits, *self.memory.results)

    def read(self, byte: int) -> np.ndarray:
        """The logits of what follows, after one byte more."""
        self.token.set(np.array([[byte]], np.int32))
        self.graph.compute(threads=self.threads)
        self.memory.move_on()
        return self.logits.numpy()[0, 0].astype(np.float64)


def generate(model: DeltaLM, prompt: str, length: int, *, temperature: float, seed: int, threads: int | None) -> str:
    """`length` bytes that the model thinks may follow the prompt."""
    writer, rng = Writer(model, threads), np.random.default_rng(seed)
    text = list(prompt.encode())
    steps = [writer.read(byte) for byte in text]
    for _ in range(length):
        scaled = steps[-1] / max(temperature, 1e-6)
        odds = np.exp(scaled - scaled.max())
        text.append(int(rng.choice(BYTES, p=odds / odds.sum())))
        steps.append(writer.read(text[-1]))
    print(
        f"\nlogits token by token are off from those in chunks by {difference(model, text, steps):.1e} of the largest"
    )
    return bytes(text).decode(errors="replace")


def difference(model: DeltaLM, text: list[int], steps: list[np.ndarray]) -> float:
    """Between the logits that were read token by token and those of all tokens at once."""
    tokens = gg.tensor(np.array([text], np.int32))
    logits = model.logits(tokens)
    gg.Graph().build_forward_expand(logits).compute()
    return float(np.abs(logits.numpy()[0] - np.array(steps)).max() / np.abs(logits.numpy()).max())


if __name__ == "__main__":
    main(DeltaLM, generate, __doc__, "kda-run")
