"""What `help` says: public names have docstrings, with shapes or dtypes, what is raised, and the source of formulas."""

import inspect
import pkgutil
import re
import types

import pytest

import ggrad as gg
import ggrad.mimic as mimic
from ggrad.core.op import Op
from ggrad.testing import stubs

MODULES = [getattr(gg, name) for name in dir(gg) if isinstance(getattr(gg, name), types.ModuleType)]
MODULES += [pkgutil.resolve_name(f"{mimic.__name__}.{m.name}") for m in pkgutil.iter_modules(mimic.__path__)]
RAISES_NOTHING = {"set_output"}


def offered(module: types.ModuleType) -> list[str]:
    return getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def public() -> dict[str, object]:
    """All that programs may call, by name: of the package, of its ops and of the modules it offers."""
    found = {name: getattr(gg, name) for name in dir(gg) if not name.startswith("_")}
    for module in MODULES:
        place = "" if module is gg.ops else f"{module.__name__.rpartition('.')[2]}."
        found |= {place + name: getattr(module, name) for name in offered(module)}
    return {name: value for name, value in found.items() if isinstance(value, Op) or inspect.isroutine(value)
            or inspect.isclass(value)}  # fmt: skip


PUBLIC = public()
CALLED = [name for name, value in PUBLIC.items() if not inspect.isclass(value)]
MEMBERS = {
    f"{name}.{member}": value
    for name, owner in PUBLIC.items()
    if inspect.isclass(owner) and owner.__module__.startswith("ggrad")
    for member, value in vars(owner).items()
    if not member.startswith("_") and isinstance(value, (types.FunctionType, classmethod, staticmethod, property))
}


def takes_tensors(value: object) -> bool:
    if isinstance(value, Op):
        return True
    annotations = getattr(value, "__annotations__", {})
    return any("Tensor" in str(kind) for name, kind in annotations.items() if name != "return")


TAKING = [name for name in CALLED if takes_tensors(PUBLIC[name])]
SHAPES = re.compile(r"\[|shape|scalar|\baxis\b|\baxes\b|\brows?\b|elementwise|broadcast|\bf32\b|\bi32\b", re.I)


def test_there_is_much_to_ask():
    assert len(TAKING) > 250 and len(MEMBERS) > 100


@pytest.mark.parametrize("name", [*PUBLIC, *MEMBERS])
def test_it_has_a_docstring(name):
    text = inspect.getdoc({**PUBLIC, **MEMBERS}[name])
    assert text and len(text.split()) > 1


@pytest.mark.parametrize("name", TAKING)
def test_what_takes_tensors_says_of_which_shape_or_dtype(name):
    assert SHAPES.search(inspect.getdoc(PUBLIC[name]))


@pytest.mark.parametrize("name", [name for name in TAKING if name not in RAISES_NOTHING])
def test_what_takes_tensors_says_what_it_raises(name):
    assert re.search(r"Raises:\n(.*\n)*? +\w+Error: ", inspect.getdoc(PUBLIC[name]))


# Whose formulas they are.
SOURCES = {
    "Dao": "flash_attn_ext flash_attn_back ssm_scan ssm_conv",
    "Kimi": "kda kda_recurrent kda_gate",
    "DeepSeek": "sparse_flash_mla sparse_flash_mla_grad lightning_indexer",
    "Yuan": "compress_kv",
    "Gu": "ssm_scan",
    "Peng": "rwkv_wkv6 rwkv_wkv7 rope",
    "Su": "rope",
    "Wang": "rope_multi",
    "Yang": "gated_linear_attn gated_delta_net",
    "Loshchilov": "AdamW opt_step_adamw SGD opt_step_sgd schedule.cosine",
    "Kingma": "AdamW opt_step_adamw",
    "Pascanu": "clip_factor",
    "Ba,": "norm",
    "Zhang": "rms_norm",
    "Wu": "group_norm",
    "Hendrycks": "gelu gelu_erf gelu_quick",
    "Elfwing": "silu",
    "Shazeer": "swiglu geglu geglu_erf geglu_quick reglu mul_mat_id",
    "OpenAI": "swiglu_oai",
    "Clevert": "elu",
    "Klambauer": "selu",
    "Barron": "celu",
    "Misra": "mish",
    "Maas": "leaky_relu",
    "Howard": "hardswish hardsigmoid",
    "Huang": "xielu",
    "Salmon": "dropout flash_attn_ext",
    "Zhu": "dsv4_hc_comb dsv4_hc_pre dsv4_hc_post",
    "Li": "get_rel_pos add_rel_pos",
    "Vaswani": "timestep_embedding",
    "Huber": "huber_loss",
    "Kullback": "kl_div_loss",
    "Balntas": "triplet_margin_loss",
    "Radford": "contrastive_loss",
    "Rafailov": "dpo_loss",
    "Graves": "ctc_loss ctc ctc_back",
}


@pytest.mark.parametrize(("author", "name"), [(a, name) for a, names in SOURCES.items() for name in names.split()])
def test_formulas_of_the_literature_name_their_source(author, name):
    assert re.search(rf"Sources?: .*\b{author}", inspect.getdoc(PUBLIC[name]), re.S)


def test_what_the_declaration_knows_is_in_the_docstring():
    text = inspect.getdoc(gg.get_rows)
    assert "Takes x: f32 or f16 or bf16 or quantized; ids: i32." in text and "ShapeError: shapes, dtypes" in text
    assert "Takes x: f32 (f16 and bf16 are cast)." in inspect.getdoc(gg.relu)
    assert inspect.getdoc(gg.custom).count("Raises:") == 1
    assert "Takes x: f32 (f16 and bf16 are cast)." in stubs.stub().partition("def relu(")[2].partition("\ndef ")[0]
