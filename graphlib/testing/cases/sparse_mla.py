"""Sparse latent attention: every mode, layout and mask; lists with holes; lengths; tokens that see nothing."""

import numpy as np

import ggrad as gg

INF, NAN = np.inf, np.nan
BAND, CAUSAL = {"ori_mask_mode": 4}, {"ori_mask_mode": 3}


def ints(m, values):
    return m.of(np.asarray(values, np.int32), dtype=gg.I32, param=False)


def window(m, B=1, S1=7, S2=None, N1=3, D=5, *, left=2, right=0, sinks=True, **options):
    q, kv = m(B, S1, N1, D), m(B, S2 or S1, 1, D)
    return gg.sparse_flash_mla(
        q, ori_kv=kv, sinks=m(N1) if sinks else None, ori_mask_mode=4, ori_win_left=left, ori_win_right=right, **options
    )


def compressed(m, B=1, S1=13, S2=None, N1=2, D=4, *, ratio=4, residual=None, picks=None, **options):
    """A window of three tokens and compressed rows, all of them or those in `picks`: [B, S1, 1, K]."""
    S2 = S2 or S1
    options = BAND | {"ori_win_left": 2, "ori_win_right": 0, "cmp_mask_mode": 3} | options
    if options["cmp_mask_mode"] == 3 and ratio > 1:
        options["cmp_residual_kv"] = ints(m, [S2 % ratio] * B if residual is None else residual)
    if picks is not None:
        options["cmp_sparse_indices"] = ints(m, picks)
    q, ori, cmp, sinks = m(B, S1, N1, D), m(B, S2, 1, D), m(B, S2 // ratio, 1, D), m(N1)
    return gg.sparse_flash_mla(q, ori_kv=ori, cmp_kv=cmp, sinks=sinks, cmp_ratio=ratio, **options)


def chosen(m, B, S1, rows, K, holes=0.3):
    """Lists of different rows, -1 in some places: first, in the middle, everywhere."""
    order = np.argsort(m.rng.random((B, S1, 1, max(rows, K))), -1)[..., :K].astype(np.int32)
    order[m.rng.random(order.shape) < holes] = -1
    order[:, -1], order[:, 0, 0, 0] = -1, -1
    return order


def sequences(m, lengths_q, lengths_kv, N1=3, D=4, *, ratio=0, K=0, spare=0, **options):
    """TND; `spare` tokens and rows after the last sequence."""
    cu_q, cu_kv = np.cumsum([0, *lengths_q]), np.cumsum([0, *lengths_kv])
    q, kv = m(cu_q[-1] + spare, N1, D), m(cu_kv[-1] + spare, 1, D)
    options = {"ori_mask_mode": 4, "ori_win_left": 3, "ori_win_right": 0} | options
    options |= {"cu_seqlens_q": ints(m, cu_q), "cu_seqlens_ori_kv": ints(m, cu_kv)}
    if ratio:
        groups = [n // ratio for n in lengths_kv]
        options |= {"cmp_kv": m(sum(groups) + spare, 1, D), "cu_seqlens_cmp_kv": ints(m, np.cumsum([0, *groups]))}
        options |= {"cmp_ratio": ratio, "cmp_mask_mode": 3}
        if ratio > 1:
            options["cmp_residual_kv"] = ints(m, [n % ratio for n in lengths_kv])
    if K:
        options["cmp_sparse_indices"] = ints(m, chosen(m, 1, q.shape[0], 3, K)[0])
    return gg.sparse_flash_mla(q, ori_kv=kv, sinks=m(N1), layout_q="TND", layout_kv="TND", **options)


def both_lists(m, S1=6, S2=9):
    q, ori, cmp = m(1, S1, 3, 5), m(1, S2, 1, 5), m(1, S2 // 2, 1, 5)
    return gg.sparse_flash_mla(
        q, ori_kv=ori, cmp_kv=cmp, cmp_ratio=2, sinks=m(3),
        ori_sparse_indices=ints(m, chosen(m, 1, S1, S2, 5)), ori_topk_length=m.ints(1, S1, 1, low=-1, below=7),
        cmp_sparse_indices=ints(m, chosen(m, 1, S1, 4, 3, holes=0)), cmp_topk_length=m.ints(1, S1, 1, below=4),
    )  # fmt: skip


def used(m, **options):
    """What is not in use holds NaN."""
    q, ori, cmp = (m.rng.uniform(-2, 2, shape) for shape in ((2, 6, 2, 4), (2, 12, 1, 4), (2, 6, 1, 4)))
    q[0, 4:], q[1, 5:], ori[0, 9:], ori[1, 11:], cmp[0, 4:], cmp[1, 5:] = (NAN,) * 6
    options |= {"seqused_q": ints(m, [4, 5]), "seqused_ori_kv": ints(m, [9, 11]), "seqused_cmp_kv": ints(m, [4, 5])}
    options |= {
        "cmp_residual_kv": ints(m, [1, 1]),
        "cmp_ratio": 2,
        "cmp_mask_mode": 3,
        "cmp_kv": m.of(cmp, param=False),
    }
    return gg.sparse_flash_mla(
        m.of(q, param=False), ori_kv=m.of(ori, param=False), ori_mask_mode=4, ori_win_left=3, **options
    )


def pages(m, **options):
    """Pages of three rows, those not in any table hold NaN; tables are longer than what is in use."""
    ori, cmp = m.rng.uniform(-2, 2, (6, 3, 1, 4)), m.rng.uniform(-2, 2, (4, 2, 1, 4))
    ori[[1, 5]], cmp[3] = NAN, NAN
    return gg.sparse_flash_mla(
        m(2, 5, 3, 4, param=False), ori_kv=m.of(ori, param=False), cmp_kv=m.of(cmp, param=False), layout_kv="PA_BBND",
        ori_block_table=ints(m, [[2, 0, 99], [4, 3, -7]]), cmp_block_table=ints(m, [[1, 0], [2, 9]]),
        seqused_ori_kv=ints(m, [6, 5]), seqused_cmp_kv=ints(m, [3, 2]), cmp_residual_kv=ints(m, [0, 1]), cmp_ratio=2,
        cmp_mask_mode=3, ori_mask_mode=3, sinks=m(3, param=False), **options,
    )  # fmt: skip


def with_sinks(m, *sinks, **options):
    q, kv = m(1, 6, len(sinks), 4, param=False), m(1, 4, 1, 4, param=False)
    return gg.sparse_flash_mla(q, ori_kv=kv, sinks=m.of(sinks, param=False), ori_mask_mode=3, **options)


def garbage_at_the_ends(m):
    """A window in which NaN and infinities are seen by some tokens of a block and not by others."""
    q, kv = m.rng.uniform(-2, 2, (1, 9, 2, 4)), m.rng.uniform(-2, 2, (1, 9, 1, 4))
    kv[0, 4, 0, 1], kv[0, 8, 0, 2] = NAN, INF
    return gg.sparse_flash_mla(
        m.of(q, param=False), ori_kv=m.of(kv, param=False), ori_mask_mode=4, ori_win_left=2, ori_win_right=0
    )


FORWARD = {
    "a window": lambda m: window(m),
    "a window, without sinks, several batches": lambda m: window(m, B=2, S1=9, N1=4, D=8, sinks=False),
    "a window, more keys": lambda m: window(m, S1=5, S2=11, left=4),
    "a window, more queries: the first see nothing": lambda m: window(m, S1=9, S2=4, left=20),
    "a window that looks ahead": lambda m: window(m, S1=6, S2=8, left=-1, right=2),
    "a window of one": lambda m: window(m, left=0),
    "a window without bounds": lambda m: window(m, left=-1, right=-1, S2=4),
    "a window as wide as may be": lambda m: window(m, left=2**31 - 1, right=2**31 - 1),
    "and its lse": lambda m: window(m, S1=9, S2=7, return_softmax_lse=True),
    "one head, many tokens in a block": lambda m: window(m, S1=150, N1=1, D=4, left=40),
    "many heads, several panels for a token": lambda m: window(m, S1=5, N1=67, D=3),
    "a block of many heads": lambda m: window(m, S1=3, N1=140, D=2),
    "large d": lambda m: window(m, S1=4, N1=5, D=131),
    "more keys than are copied at a time": lambda m: window(m, S1=21, S2=370, N1=16, D=8, left=-1, right=0),
    "several units": lambda m: window(m, B=2, S1=301, N1=16, D=16, left=30),
    "causal": lambda m: gg.sparse_flash_mla(m(2, 5, 3, 4), ori_kv=m(2, 7, 1, 4), **CAUSAL, ori_win_left=1),
    "all": lambda m: gg.sparse_flash_mla(m(1, 5, 3, 4), ori_kv=m(1, 7, 1, 4)),
    "all compressed rows": lambda m: compressed(m, B=2),
    "all compressed rows, no mask": lambda m: compressed(m, cmp_mask_mode=0),
    "compressed rows alone": lambda m: gg.sparse_flash_mla(
        m(1, 9, 2, 4), cmp_kv=m(1, 3, 1, 4), cmp_ratio=3, cmp_mask_mode=3, cmp_residual_kv=ints(m, [1])
    ),
    "ratio 1": lambda m: compressed(m, S1=6, ratio=1),
    "ratio 128": lambda m: compressed(m, S1=5, S2=260, ratio=128),
    "without a residual it is 0": lambda m: gg.sparse_flash_mla(
        m(1, 8, 2, 4), cmp_kv=m(1, 2, 1, 4), cmp_ratio=4, cmp_mask_mode=3
    ),
    "a choice": lambda m: compressed(m, B=2, picks=chosen(m, 2, 13, 3, 3)),
    "a choice, several units": lambda m: compressed(
        m, S1=530, N1=16, D=16, picks=chosen(m, 1, 530, 132, 9), ori_win_left=9
    ),
    "a list wider than the rows": lambda m: compressed(m, picks=chosen(m, 1, 13, 3, 9)),
    "a list longer than is copied at a time": lambda m: compressed(
        m, S1=400, N1=2, D=3, ratio=1, picks=chosen(m, 1, 400, 400, 333, holes=0.001)
    ),
    "every token picks the same": lambda m: compressed(m, picks=np.zeros((1, 13, 1, 2), np.int32)),
    "entries out of range are passed over": lambda m: compressed(
        m, picks=np.tile(np.array([2**31 - 1, 1, 3, 0], np.int32), (1, 13, 1, 1))
    ),
    "a list of which only a window counts": lambda m: gg.sparse_flash_mla(
        m(1, 7, 2, 4),
        ori_kv=m(1, 9, 1, 4),
        sinks=m(2),
        ori_mask_mode=4,
        ori_win_left=2,
        ori_win_right=1,
        ori_sparse_indices=ints(m, chosen(m, 1, 7, 9, 7, holes=0.1)),
    ),
    "empty lists": lambda m: compressed(m, picks=np.full((1, 13, 1, 3), -1)),
    "lists of no entries": lambda m: compressed(m, picks=np.zeros((1, 13, 1, 0), np.int32)),
    "lists of both kinds, with lengths": both_lists,
    "sequences": lambda m: sequences(m, (3, 0, 5, 1), (4, 2, 5, 0)),
    "sequences, compressed": lambda m: sequences(m, (3, 6, 0), (9, 6, 3), ratio=3),
    "sequences, a choice, tokens to spare": lambda m: sequences(m, (3, 0, 7), (9, 4, 7), ratio=2, K=3, spare=4),
    "no sequences": lambda m: sequences(m, (), (), spare=2),
    "not all in use": lambda m: used(m),
    "not all in use, a choice": lambda m: used(m, cmp_sparse_indices=ints(m, chosen(m, 2, 6, 6, 4, holes=0.1))),
    "nothing in use": lambda m: window(m, B=2, seqused_q=ints(m, [0, 3]), seqused_ori_kv=ints(m, [2, 0])),
    "pages": lambda m: pages(m),
    "pages, a choice": lambda m: pages(m, cmp_sparse_indices=ints(m, chosen(m, 2, 5, 3, 2, holes=0.1))),
    "sinks of any size": lambda m: with_sinks(m, 120.0, 95.0, -60.0, -INF, INF),
    "garbage at the ends": garbage_at_the_ends,
    "large scores": lambda m: gg.sparse_flash_mla(
        m(1, 4, 2, 4, param=False), ori_kv=m(1, 4, 1, 4, param=False), softmax_scale=1e30
    ),
    "no tokens": lambda m: window(m, S1=0, S2=3),
    "no rows": lambda m: gg.sparse_flash_mla(m(1, 3, 2, 4), ori_kv=m(1, 0, 1, 4), sinks=m(2)),
    "no heads": lambda m: window(m, N1=0),
    "no d": lambda m: window(m, D=0),
}


def gradients(m, out):
    """Of a result, by all that it was made of."""
    node = out.src[0]
    given = {name: t for name, t in zip(node.op.inputs, node.src, strict=True) if t is not None}
    made = gg.sparse_flash_mla_grad(
        given.pop("q"), m(*out.shape), *node.parts[:2], **given, **vars(node.attrs["rules"])
    )
    return tuple(t for t in made if t is not None)


GRAD = {
    name: lambda m, build=FORWARD[name]: gradients(m, build(m))
    for name in (
        "a choice",
        "a window",
        "all compressed rows",
        "garbage at the ends",
        "lists of both kinds, with lengths",
        "not all in use, a choice",
        "sequences, a choice, tokens to spare",
        "several units",
        "no heads",
        "no tokens",
    )
}
GRAD["sinks of any size"] = lambda m: gradients(m, with_sinks(m, 50.0, 9.0, -60.0, -INF, INF))

CASES = {"sparse_flash_mla": FORWARD, "sparse_flash_mla_grad": GRAD}
NO_GRADIENT = {"sparse_flash_mla_grad"}
