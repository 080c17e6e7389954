"""ggrad's kernels on torch's tape: right beside torch's own in float64, in every way that programs run."""

import threading

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.errors import GradientError, IndexRangeError, ShapeError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not gg.native.built(), reason="needs the C module")
F = torch.nn.functional
gt = pytest.importorskip("ggrad.torch")


def qkv(B=2, H=4, N=33, D=16, HK=None, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = [(B, H, N, D), (B, HK or H, N, D), (B, HK or H, N, D)]
    return [torch.randn(s, generator=g).to(dtype).requires_grad_() for s in shapes]


def double(xs):
    return [x.detach().double().requires_grad_() for x in xs]


def results_and_gradients(f, xs, seed=9):
    y = f(*xs)
    w = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad((y * w).sum(), xs)]


def assert_close(made, wanted, tolerance):
    for a, b in zip(made, wanted, strict=True):
        assert a.shape == b.shape
        assert float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30)) < tolerance


MASK = torch.rand(33, 33, generator=torch.Generator().manual_seed(1)) < 0.6
MASK[:, 0] = True
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.5},
    "boolean mask": {"attn_mask": MASK},
    "mask of heads": {"attn_mask": torch.randn(1, 4, 33, 33, generator=torch.Generator().manual_seed(2))},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_is_torchs(options):
    xs = qkv()
    in_double = {k: v.double() if getattr(v, "dtype", None) == torch.float32 else v for k, v in options.items()}
    made = results_and_gradients(lambda *x: gt.attention(*x, **options), xs)
    wanted = results_and_gradients(lambda *x: F.scaled_dot_product_attention(*x, **in_double), double(xs))
    assert_close(made, wanted, 1e-5)  # f32 sums of 33 terms


def test_grouped_heads():
    xs = qkv(HK=2)
    made = results_and_gradients(lambda *x: gt.attention(*x, enable_gqa=True), xs)
    wanted = results_and_gradients(lambda *x: F.scaled_dot_product_attention(*x, enable_gqa=True), double(xs))
    assert_close(made, wanted, 1e-5)
    with pytest.raises(ShapeError, match="enable_gqa"):
        gt.attention(*xs)


def plainly(q, k, v, *, window=None, softcap=0.0, sinks=None, causal=False):
    """The formula, as torch would have it written out."""
    s = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    if causal:
        seen &= j <= i
    if window:
        seen &= (j >= i - window[0]) & ((j <= i + window[1]) if window[1] >= 0 else True)
    s = s.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], 3)
    p = s.softmax(3)
    return (p if sinks is None else p[..., :-1]) @ v


def test_window_softcap_and_sinks():
    xs = qkv()
    sinks = torch.randn(4, requires_grad=True)
    options = {"window": (5, -1), "softcap": 3.0}
    made = results_and_gradients(
        lambda q, k, v, s: gt.attention(q, k, v, is_causal=True, sinks=s, **options), [*xs, sinks]
    )
    wanted = results_and_gradients(
        lambda q, k, v, s: plainly(q, k, v, causal=True, sinks=s, **options), double([*xs, sinks])
    )
    assert_close(made, wanted, 1e-5)


def test_packed_sequences_are_attended_to_one_by_one():
    xs = qkv(B=1)
    cu = torch.tensor([0, 10, 33], dtype=torch.int32)
    made = gt.attention(*xs, is_causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu)
    for a, b in ((0, 10), (10, 33)):
        alone = gt.attention(*(x[:, :, a:b] for x in xs), is_causal=True)
        torch.testing.assert_close(made[:, :, a:b], alone)
    with pytest.raises(ShapeError, match="both"):
        gt.attention(*xs, cu_seqlens_q=cu)
    with pytest.raises(IndexRangeError, match="99"):
        gt.attention(*xs, cu_seqlens_q=torch.tensor([0, 99]), cu_seqlens_k=cu[:2])


def test_dropout_is_drawn_from_torchs_generator_and_keeps_the_mean():
    q, k, v = qkv(B=1, H=2, N=64)
    torch.manual_seed(3)
    first = gt.attention(q, k, v, dropout_p=0.5)
    other = gt.attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(gt.attention(q, k, v, dropout_p=0.5), first) and not torch.equal(first, other)
    seeds = [gt.attention(q, k, v, dropout_p=0.5, seed=torch.tensor(i, dtype=torch.int32)) for i in range(200)]
    off = torch.stack(seeds).mean(0) - gt.attention(q, k, v)
    assert off.abs().mean() < 0.05  # the standard error of 200 draws is about 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_computed_in_f32_and_come_back_as_halves(dtype):
    xs = qkv(dtype=dtype)
    made = results_and_gradients(lambda *x: gt.attention(*x, is_causal=True), xs)
    assert [x.dtype for x in made] == [dtype] * 4
    wanted = results_and_gradients(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), double(xs))
    assert_close(made, wanted, 1.5 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("turn", [(0, 2, 1, 3), (1, 0, 2, 3), (3, 2, 1, 0)])
def test_tensors_may_have_any_strides(turn):
    xs = qkv()
    turned = [x.detach().permute(turn).contiguous().permute(*np.argsort(turn)).requires_grad_() for x in xs]
    gaps = [torch.stack([x.detach(), x.detach()], -1)[..., 0].requires_grad_() for x in xs]
    repeated = [x.detach()[:1].expand(2, -1, -1, -1).requires_grad_() for x in xs]
    f = lambda *x: gt.attention(*x, is_causal=True)  # noqa: E731
    wanted = results_and_gradients(f, xs)
    for other in (turned, gaps):
        assert all(torch.equal(a, b) for a, b in zip(results_and_gradients(f, other), wanted, strict=True))
    once = results_and_gradients(f, [x.detach().contiguous().requires_grad_() for x in repeated])
    assert all(torch.equal(a, b) for a, b in zip(results_and_gradients(f, repeated), once, strict=True))


def test_negated_views_are_read_as_what_they_mean():
    for x in (torch.complex(torch.ones(3), torch.ones(3)).conj().imag, torch._neg_view(torch.ones(3))):
        assert x.is_neg() and gt.function(lambda x: x * 2.0)(x).tolist() == [-2, -2, -2]


# -- functions ------------------------------------------------------------------------------------


def test_any_function_with_gradients_and_its_gradients_are_finite_differences():
    @gt.function
    def swiglu(x, gate, up):
        return gg.silu(gg.mul_mat(gate, x)) * gg.mul_mat(up, x)

    g = torch.Generator().manual_seed(0)
    xs = [torch.randn(s, generator=g, requires_grad=True) for s in ((3, 4), (5, 4), (5, 4))]
    # central differences of f32: eps^2 of the third derivative, and 1e-7 / eps of rounding
    assert torch.autograd.gradcheck(swiglu, xs, eps=1e-2, atol=2e-3, rtol=1e-2)
    assert torch.autograd.gradcheck(
        lambda q, k, v: gt.attention(q, k, v, is_causal=True), qkv(1, 2, 3, 4), eps=1e-2, atol=2e-3, rtol=1e-2
    )


def test_several_results_and_inputs_without_gradients():
    f = gt.function(lambda x, i: (gg.get_rows(x, i), gg.argsort(x), x * 1.0))
    x, ids = torch.randn(3, 4, requires_grad=True), torch.tensor([2, 0])
    rows, order, same = f(x, ids)
    assert order.dtype == torch.int32 and not order.requires_grad and rows.requires_grad
    (rows.sum() + 2 * same.sum()).backward()
    assert x.grad.sum(1).tolist() == [12, 8, 12]
    x.grad = None
    f(x, ids)[2].sum().backward()
    assert x.grad.sum() == 12
    with pytest.raises(ShapeError, match="outside of i32"):
        f(x, torch.tensor([2**32]))


def test_several_forwards_before_their_backwards():
    f = gt.function(lambda x, w: gg.tanh(gg.mul_mat(w, x)))
    w = torch.randn(3, 4, requires_grad=True)
    xs = [torch.randn(2, 4) for _ in range(3)]
    total = sum(f(x, w).sum() for x in xs)
    total.backward()
    made, w.grad = w.grad, None
    sum(torch.tanh(x @ w.T).sum() for x in xs).backward()
    torch.testing.assert_close(made, w.grad)


def test_what_was_changed_in_place_is_noticed():
    x = torch.ones(3, requires_grad=True)
    h = x * 1.0
    y = gt.function(gg.sqr)(h)
    h += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_differentiating_twice_is_refused():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(GradientError, match="cannot be differentiated again"):
        torch.autograd.grad(gt.function(gg.sqr)(x).sum(), x, create_graph=True)


def test_results_are_the_same_from_several_threads():
    f = gt.function(lambda q, k, v: gg.flash_attn_ext(q, k, v, causal=True))
    inputs = [qkv(1, 4, 65, 16, seed=i) for i in range(6)]
    wanted = [results_and_gradients(f, xs) for xs in inputs]
    failures = []

    def work(i):
        for _ in range(10):
            made = results_and_gradients(f, inputs[i])
            if not all(torch.equal(a, b) for a, b in zip(made, wanted[i], strict=True)):
                failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


# -- the ways in which torch runs programs ----------------------------------------------------------


def samples():
    q, k, v = qkv(1, 2, 5, 8)
    masked = gt.named._with("attention", ("qkvm", "top-left", 3, -1, None, 0.0, 0.0))
    capped = gt.named._with("attention", ("qkv", None, -1, -1, 0.3, 2.0, 0.0))
    rows = gt.function(lambda x, i: (gg.get_rows(x, i), gg.argsort(x)))
    turned = [x.detach().transpose(1, 2).requires_grad_() for x in qkv(1, 5, 2, 8)]
    return {
        "attention": ([q, k, v, torch.randn(5, 5, requires_grad=True)], masked.name),
        "strides": (turned, capped.name),
        "integers": ([torch.randn(3, 4, requires_grad=True), torch.tensor([1, 2], dtype=torch.int32)], rows.name),
    }


@pytest.mark.parametrize("sample", ["attention", "strides", "integers"])
def test_the_operator_is_one_by_torchs_own_checks(sample):
    torch.library.opcheck(torch.ops.ggrad.call.default, samples()[sample])


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_program_has_no_break_and_the_same_results(dynamic):
    def program(q, k, v):
        out = gt.attention(q * 2.0, k, v, is_causal=True, window=(4, 0))
        return gt.cross_entropy(out.flatten(0, 2), torch.zeros(out.shape[:3].numel(), dtype=torch.int32)) * 3.0

    compiled = torch.compile(program, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (9, 12):
        xs = qkv(1, 2, n, 8)
        torch.testing.assert_close(results_and_gradients(compiled, xs), results_and_gradients(program, xs))


def test_autocast_takes_halves_and_computes_in_f32():
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(32, 96), torch.randn(2, 17, 32)

    def out(attention, **autocast):
        with torch.autocast("cpu", dtype=torch.bfloat16, **autocast):
            q, k, v = (y.unflatten(2, (2, 16)).transpose(1, 2) for y in layer(x).chunk(3, 2))
            return attention(q, k, v, is_causal=True)

    made, exact = out(gt.attention), out(F.scaled_dot_product_attention, enabled=False)
    assert made.dtype == torch.bfloat16
    assert (made - exact).abs().max() < 0.05  # bf16 has 8 bits
    made.float().sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(reentrant):
    from torch.utils.checkpoint import checkpoint

    xs = qkv()
    block = lambda *x: gt.attention(*x, is_causal=True)  # noqa: E731
    checkpoint(block, *xs, use_reentrant=reentrant).sum().backward()
    made = [x.grad.clone() for x in xs]
    wanted = torch.autograd.grad(block(*xs).sum(), xs)
    assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))


def test_data_parallel_training_gets_the_gradients():
    dist = torch.distributed
    layer = torch.nn.Linear(8, 24)
    x = torch.randn(2, 5, 8)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return gt.attention(*(y.unsqueeze(1) for y in self.layer(x).chunk(3, 2)), is_causal=True)

    wanted = torch.autograd.grad(Model()(x).sum(), layer.weight)[0]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.nn.parallel.DistributedDataParallel(Model())(x).sum().backward()
    finally:
        dist.destroy_process_group()
    assert torch.equal(layer.weight.grad, wanted)


def test_without_gradients_nothing_is_kept():
    xs = qkv()
    with torch.no_grad():
        assert gt.attention(*xs).grad_fn is None
    with torch.inference_mode():
        made = gt.attention(*xs)
    torch.testing.assert_close(made, gt.attention(*xs).detach())


# -- kernels --------------------------------------------------------------------------------------


def test_kda_is_ggrads():
    g = torch.Generator().manual_seed(0)
    shapes = [(1, 20, 2, 8), (1, 20, 2, 8), (1, 20, 2, 8), (1, 20, 2, 8), (1, 20, 2)]
    q, k, v, decay, beta = (torch.randn(s, generator=g) for s in shapes)
    decay, beta = -decay.abs() * 0.1, beta.sigmoid()
    xs = [x.requires_grad_() for x in (q, k, v, decay, beta)]
    o, state = gt.kda(*xs, output_final_state=True, use_qk_l2norm_in_kernel=True)
    (o.sum() + state.sum()).backward()
    leaves = [gg.tensor(x, param=True) for x in xs]
    y, last = gg.kda(*leaves, output_final_state=True, use_qk_l2norm_in_kernel=True)
    loss = gg.sum(y) + gg.sum(last)
    graph = gg.Graph().build_forward_expand(y, last).build_backward_expand(loss).compute()
    np.testing.assert_array_equal(o.detach().numpy(), y.numpy())
    for x, leaf in zip(xs, leaves, strict=True):
        np.testing.assert_allclose(x.grad.numpy(), graph.grad(leaf).numpy(), rtol=1e-5, atol=1e-6)


def test_sparse_latent_attention_is_attention_where_nothing_is_hidden():
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, 7, 2, 64, generator=g, requires_grad=True)
    kv = torch.randn(1, 7, 1, 64, generator=g, requires_grad=True)
    made = gt.sparse_flash_mla(q, ori_kv=kv, softmax_scale=0.1)
    made.sum().backward()
    grads = q.grad, kv.grad
    q2, kv2 = (x.detach().double().requires_grad_() for x in (q, kv))
    out = F.scaled_dot_product_attention(
        q2.transpose(1, 2), *(2 * [kv2.transpose(1, 2).expand(1, 2, 7, 64)]), scale=0.1
    )
    out.sum().backward()
    assert_close([made, *grads], [out.transpose(1, 2), q2.grad, kv2.grad], 1e-5)


def test_losses_are_torchs():
    g = torch.Generator().manual_seed(0)
    hidden, head = (
        torch.randn(50, 16, generator=g, requires_grad=True),
        torch.randn(70, 16, generator=g, requires_grad=True),
    )
    targets = torch.randint(70, (50,), generator=g)
    targets[3] = -100
    wanted = results_and_gradients(lambda h, w: F.cross_entropy(h @ w.T, targets), double([hidden, head]))
    for f in (
        lambda h, w: gt.linear_cross_entropy(h, w, targets),
        lambda h, w: gt.cross_entropy(h @ w.T, targets),
    ):
        assert_close(results_and_gradients(f, [hidden, head]), wanted, 1e-5)
    with pytest.raises(IndexRangeError, match="70"):
        gt.cross_entropy(torch.ones(1, 70), torch.tensor([70]))


@pytest.mark.parametrize("kind", ["delta_scan", "selective_scan"])
def test_scans_are_ggrads(kind):
    from ggrad.testing.cases import CASES
    from ggrad.testing.check import results_of

    node = results_of(next(iter(CASES[kind].values())))[0].src[0]
    arrays = [np.array(s.numpy()) if s.is_leaf else _value(s) for s in node.src if s is not None]
    made = getattr(gt, kind)(*map(torch.from_numpy, arrays))
    y, last = getattr(gg.ops, kind)(*arrays)
    gg.Graph().build_forward_expand(y, last).compute()
    np.testing.assert_array_equal(made[0].numpy(), y.numpy())
    np.testing.assert_array_equal(made[1].numpy(), last.numpy())


def _value(t):
    gg.Graph().build_forward_expand(t).compute()
    return t.numpy().copy()


def test_adamw_makes_torchs_steps():
    def train(optimizer_of):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(s)) for s in ((4, 3), (5,), (2, 2))]
        params.append(torch.nn.Parameter(torch.randn(3, 4).T))
        optimizer = optimizer_of([{"params": params[:2], "lr": 0.02}, {"params": params[2:], "weight_decay": 0.0}])
        for i in range(5):
            optimizer.zero_grad()
            used = params if i != 2 else params[1:]  # one has no gradient in the third step
            sum((p.float() ** 3).sum() for p in used).backward()
            optimizer.step()
        return params, optimizer

    (made, ours), (wanted, theirs) = (
        train(lambda g: gt.AdamW(g, lr=0.01)),
        train(lambda g: torch.optim.AdamW(g, lr=0.01)),
    )
    for a, b in zip(made, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)  # five steps, rounded in another order
    states = [o.state_dict()["state"] for o in (ours, theirs)]
    assert states[0].keys() == states[1].keys() and states[0][0].keys() == states[1][0].keys()
    ours.load_state_dict(ours.state_dict())
    ours.step()


def test_adamw_refuses_what_it_cannot_move():
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    p.grad = torch.ones(2, dtype=torch.float64)
    with pytest.raises(ShapeError, match="float64"):
        gt.AdamW([p]).step()
    for wrong in ({"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": float("nan")}):
        with pytest.raises(ShapeError, match=next(iter(wrong))):
            gt.AdamW([p], **wrong)


# -- models ---------------------------------------------------------------------------------------


def test_a_model_of_transformers_trains_with_it_as_with_torchs():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(64, (2, 19))
    padding = torch.ones_like(ids)
    padding[1, :5] = 0

    def run(**mask):
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, **mask).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    wanted = [run(), run(attention_mask=padding)]
    with torch.no_grad():
        text = model.generate(ids[:1, :4], max_new_tokens=6, do_sample=False)
    assert gt.replace_attention(model) is model and model.config._attn_implementation == "ggrad"
    assert_close(run(), wanted[0], 1e-4)  # two layers of f32
    assert_close(run(attention_mask=padding), wanted[1], 1e-4)
    with torch.no_grad():
        assert torch.equal(model.generate(ids[:1, :4], max_new_tokens=6, do_sample=False), text)
    with pytest.raises(ShapeError, match="set_attn_implementation"):
        gt.replace_attention(torch.nn.Linear(2, 2))


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x: x.double(), r"argument 0 is torch.float64.*x.float\(\)"),
        (lambda x: x.to(torch.complex64), "complex64"),
        (lambda x: x.to_sparse(), "dense tensor on the CPU"),
        (lambda x: x[0], "four axes"),
        (lambda x: x[..., :3], "rows of q have 3"),
        (lambda x: x.detach().to("meta"), "on meta"),
        (lambda x: x.detach().numpy(), "must be a tensor of torch's, not ndarray"),
    ],
)
def test_bad_tensors_are_refused(change, message):
    q, k, v = qkv(HK=None)
    f = gt.function(lambda q, k, v: gg.flash_attn_ext(q, k, v))
    with pytest.raises(ShapeError, match=message):
        f(change(q), k, v)


def test_bad_options_are_refused():
    q, k, v = qkv()
    with pytest.raises(ShapeError, match="causal must be"):
        gt.attention(q, k, v, causal="sideways")
    with pytest.raises(ShapeError, match="says otherwise"):
        gt.attention(q, k, v, is_causal=True, causal="bottom-right")
    with pytest.raises(ShapeError, match="window"):
        gt.attention(q, k, v, window=(-2, 0))
    with pytest.raises(gg.errors.GraphError, match="no function 'nothing'"):
        torch.ops.ggrad.call([q], "nothing")


def test_an_op_without_a_gradient_is_named():
    @gg.op
    def no_rule(x):
        """x"""
        return x.spec

    with pytest.raises(GradientError, match="no_rule has no gradient rule"):
        gt.function(no_rule)(torch.ones(2, requires_grad=True))
