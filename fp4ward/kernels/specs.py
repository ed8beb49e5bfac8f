"""Every kernel as a row: what it can run, what it costs, and where it was tested. Standard library only.

`unfit` says in a sentence why a kernel cannot run a layer, `estimate` what it costs. A row's module is looked for
before it is offered, so that nothing is ever planned that is not installed.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from dataclasses import dataclass

from fp4ward.formats.formats import FORMATS, Format
from fp4ward.hardware import Hardware

TESTED = "tested on H200"
NEVER_RUN, REFERENCE = "compiled, never run on this hardware", "the definition, tested on CPU"
NO_ROOM = "left out: its own layout of the weights takes room that the cache needs"
BF16, F16, F32, F64 = "bfloat16", "float16", "float32", "float64"
ITEM = {BF16: 2, F16: 2, F32: 4, F64: 8}  # bytes
ALL_DTYPES = tuple(ITEM)
EXPERTS = {"experts": 3, "relu2_experts": 2}  # op -> matrices of one expert: gate, up, down; up, down
WIDEST = 8192  # columns of experts up to which every GPU's shared memory is known to do for a kernel that routes
MOST_CHOSEN = 32  # experts of a token that a kernel that routes can choose, shared ones among them
UNWRITTEN = ("mamba2", "relu2_experts")  # ops of architectures that are planned before their kernels exist
DENSE = {"bf16": BF16, "f16": F16, "f32": F32}  # formats that torch multiplies as they are, in their own type


@dataclass(frozen=True)
class LayerDesc:
    """One operation of a step, on the ranks' own shapes. Bytes and sizes are of the rank with the most.

    op: "linear", "embedding", "attention", "gated_delta", "mamba2" or of EXPERTS. stored: formats in the checkpoint, in
    words. formats: of its weights in memory, none for what has no weights; of experts, one a matrix where they differ.
    shape: logical, [N, K] or [E, I, H]; of attention (query heads, KV heads, head size), of gated_delta and
    mamba2 the state [N, Dk, Dv].
    local: the different shapes that ranks hold, the largest first. place: in words. top_k: experts a token. scored:
    runs only on tokens that are sampled from.
    """

    path: str
    op: str
    stored: str
    formats: tuple[Format, ...]
    shape: tuple[int, ...]
    local: tuple[tuple[int, ...], ...]
    place: str = "whole"
    top_k: int = 0
    scored: bool = False

    @property
    def weight_bytes(self) -> int:
        """In memory, on the rank with the most."""
        return self.bytes_of(self.local[0])

    def bytes_of(self, local: tuple[int, ...]) -> int:
        if self.op in EXPERTS:
            e, i, h = local
            *rows, down = self.formats * EXPERTS[self.op] if len(self.formats) == 1 else self.formats
            return e * (sum(weight_bytes(f, i, h) for f in rows) + weight_bytes(down, h, i))
        return weight_bytes(self.formats[0], *local) if self.formats else 0


def weight_bytes(format: Format, n: int, k: int) -> int:
    """Of a weight [N, K] as it lives in memory: its scales expanded to rows in f32, NVFP4's block scales as stored."""
    scales = -(-k // 128) if format.name == "fp8_block" else int(format.quantized)  # in f32, a row
    return int(n * k * format.bits) // 8 + 4 * n * scales


@dataclass(frozen=True)
class Cut:
    """How a kernel runs up to `most` tokens a matrix: in blocks of `tokens`, the last one padded (0: of any number), at
    `compute` of the rate of the units that bound it, as if there were `rows` more for all blocks (those that it takes
    to fill the machine) and `columns` more for each (what programs do before their first product and after the last).
    """

    compute: float = 0.5
    rows: float = 0
    columns: float = 0
    tokens: int = 0
    most: float = math.inf


@dataclass(frozen=True)
class KernelSpec:
    """One kernel. formats: of weights that it reads. min_sm, max_sm: inclusive; 0 is a CPU. dtypes: of activations.
    n_div, k_div: what local N and K must be multiples of. tokens: fewest and most in a step. module: where its code is:
    function(x, *weights, *routing), and prepare(*weights), "" where it reads weights as the checkpoint has them.
    copied: the share of a weight that prepare makes anew. one_type: weights in the activations' type. input: what it
    takes its input as, "high" precision or a quantized format. memory: the share of the machine's bandwidth that it
    reaches. cuts: by tokens, the last one for all that are left. extra: bytes moved beside the stored ones, a weight
    and an element of the input. launches: of LAUNCH_US each (a second number: for every expert that is hit). f32:
    multiplies in f32. sizes: of heads that it is compiled for, () for any. captured: a CUDA graph may hold it, for it
    looks at no values on the host. routes: of experts; module has routed(x, *weights, logits, router), which chooses
    them, and a whole block's `block` with its `prepare_block`."""

    name: str
    op: str
    formats: tuple[str, ...]
    module: str
    status: str
    min_sm: int = 0
    max_sm: int = 999
    dtypes: tuple[str, ...] = ALL_DTYPES
    n_div: int = 1
    k_div: int = 1
    tokens: tuple[int, int] = (1, 2**31)
    input: str = "high"
    memory: float = 0.6
    cuts: tuple[Cut, ...] = (Cut(),)
    extra: tuple[float, float] = (0, 0)
    function: str = "reference"
    prepare: str = ""
    copied: float = 1
    one_type: bool = False
    launches: tuple[float, float] = (1, 0)
    f32: bool = False
    sizes: tuple[int, ...] = ()
    captured: bool = True
    routes: bool = False

    @property
    def decodes(self) -> bool:
        """Whether it decodes weights for 16-bit products. Not the products bound that, but the units that decode."""
        return self.input == "high" and not (self.one_type or self.f32)


DECODING = 12.0  # the rate that `compute` of a kernel that decodes is a share of, in f32 rates: bf16 on an H200
LAUNCH_US = {False: 4.5, True: 5.0}  # GPU, CPU (a torch call)
# Measured on an H200, 2026-11-30 (`python bench/estimates.py --seconds 60`, bench/results/estimates_h200.jsonl), and
# fitted to two shapes of three: torch_linear, triton_*, cuda_*, torch_w8a8_linear, which reads and writes its input
# several times to quantize it. Triton's blocks of 64 tokens stand for those of 32 and 128 too.
# cuda: they have their own layout of the weight. torch_w4a4: no measurement; it quantizes in so many launches.
# references: no measurement; `extra` counts the f32 copies of weights and inputs that are written and read again.
SPECS: tuple[KernelSpec, ...] = (
    KernelSpec("torch_linear", "linear", tuple(DENSE), "linear", TESTED, one_type=True,
               memory=0.94, cuts=(Cut(1),), launches=(0.89, 0)),
    KernelSpec(
        "triton_w4a16_linear", "linear", ("nvfp4",), "triton_linear", TESTED, function="linear",
        min_sm=80, dtypes=(BF16, F16), k_div=16, memory=1,
        cuts=(Cut(0.057, 1300, 0, 8, 16), Cut(0.37, 23000, 0, 64)), launches=(0.68, 0),
    ),
    KernelSpec(
        "triton_w4a16_experts", "experts", ("nvfp4",), "triton_experts", TESTED, function="experts",
        min_sm=80, dtypes=(BF16, F16), n_div=16, k_div=16, memory=1,
        cuts=(Cut(0.1, 0, 1500, 8, 8), Cut(0.36, 0, 380, 64)), launches=(2.3, 0),
    ),
    KernelSpec(
        "cuda_w4a16_linear", "linear", ("nvfp4",), "cuda_linear", TESTED, function="linear", prepare="prepare",
        min_sm=80, dtypes=(BF16, F16), k_div=16, tokens=(1, 64), memory=0.79,
        cuts=(Cut(0.88, 3700, 290),), launches=(0.41, 0),
    ),
    KernelSpec(
        "cuda_w8a16_linear", "linear", ("fp8_tensor", "fp8_channel", "fp8_block"), "cuda_linear", TESTED,
        function="linear", prepare="prepare", min_sm=80, dtypes=(BF16, F16), k_div=16, tokens=(1, 64), memory=0.94,
        cuts=(Cut(0.99, 4400, 940),), launches=(0.34, 0),
    ),
    KernelSpec(
        "cuda_w4a16_experts", "experts", ("nvfp4",), "cuda_experts", TESTED, function="experts", prepare="prepare",
        min_sm=80, dtypes=(BF16, F16), n_div=16, k_div=16, tokens=(1, 256), memory=1,
        cuts=(Cut(0.24, 0, 570, 8),), launches=(2.2, 0), routes=True,
    ),
    KernelSpec(
        "torch_w8a8_linear", "linear", ("fp8_tensor", "fp8_channel"), "scaled_mm", TESTED, function="fp8_linear",
        min_sm=89, dtypes=(BF16,), n_div=16, k_div=16, input="fp8", memory=0.63,
        cuts=(Cut(0.59),), extra=(0, 34), launches=(5.1, 0),
    ),
    KernelSpec(
        "torch_w4a4_linear", "linear", ("nvfp4",), "scaled_mm", NEVER_RUN, function="nvfp4_linear",
        prepare="nvfp4_prepare", copied=0.125, min_sm=100, max_sm=121, dtypes=(BF16, F16), n_div=16, k_div=32,
        input="nvfp4", launches=(40, 0),
    ),
    KernelSpec(
        "reference_linear", "linear", tuple(FORMATS), "linear", REFERENCE, extra=(24, 8), launches=(12, 0), f32=True
    ),
    KernelSpec(
        "reference_experts", "experts", tuple(FORMATS), "experts", REFERENCE, extra=(24, 0), launches=(10, 45),
        f32=True, captured=False,
    ),
    KernelSpec("reference_embedding", "embedding", tuple(FORMATS), "linear", REFERENCE, launches=(4, 0)),
    KernelSpec(
        "cuda_attention", "attention", (), "cuda_attention", TESTED, function="attend", min_sm=80,
        dtypes=(BF16, F16), tokens=(1, 64), sizes=(32, 64, 128, 256),
    ),
    KernelSpec(
        "reference_attention", "attention", (), "attention", REFERENCE, launches=(12, 0), f32=True, captured=False
    ),
    KernelSpec(
        "cuda_gated_delta", "gated_delta", (), "cuda_gated_delta", TESTED, function="mix", min_sm=80,
        dtypes=(BF16, F16), tokens=(1, 64), sizes=(16, 32, 64, 128), f32=True,
    ),
    KernelSpec(
        "reference_gated_delta", "gated_delta", (), "gated_delta", REFERENCE, launches=(30, 0), f32=True, captured=False
    ),
)  # fmt: skip


def no_kernel(op: str) -> KernelSpec | None:
    """Stands for the kernel that an op of UNWRITTEN lacks: a row without a module, whose estimate is the floor."""
    row = KernelSpec("none", op, (), "", "not written yet", memory=1, cuts=(Cut(1),), launches=(0, 0))
    return row if op in UNWRITTEN else None


@functools.cache
def installed(module: str) -> bool:
    """Whether fp4ward.kernels has this module. Looks for the file; nothing is imported."""
    return importlib.util.find_spec(f"{__package__}.{module}") is not None


def unfit(spec: KernelSpec, layer: LayerDesc, hw: Hardware, dtype: str, kv: int = 2) -> str | None:
    """Why `spec` cannot run `layer` with activations of `dtype` on `hw`; None if it can. kv: cache's bytes."""
    if spec.op != layer.op:
        return f"is a kernel for {spec.op}, not for {layer.op}"
    odd = next((f for f in layer.formats if f.name not in spec.formats), None)
    if odd is not None:
        return f"reads {', '.join(spec.formats)}, not {odd.name}"
    if not spec.min_sm <= hw.sm <= spec.max_sm:
        upto = f"to {spec.max_sm}" if spec.max_sm < 999 else "or newer"
        return f"needs a GPU of SM {spec.min_sm} {upto}; {hw.name} is {f'SM {hw.sm}' if hw.sm else 'none'}"
    if dtype not in spec.dtypes:
        return f"takes {', '.join(spec.dtypes)} activations, not {dtype}"
    if spec.one_type and DENSE[layer.formats[0].name] != dtype:
        return f"multiplies weights and activations of one type, not {layer.formats[0].name} and {dtype}"
    if spec.input != "high" and any(f.activation != spec.input for f in layer.formats):
        return f"quantizes its input to {spec.input}, which this layer ({layer.stored}) does not allow"
    for shape in layer.local if layer.formats and layer.op != "embedding" else ():
        n, k = shape[-2:]
        if n % spec.n_div or k % spec.k_div:
            return f"needs N in multiples of {spec.n_div} and K of {spec.k_div}, a rank has {n} x {k}"
    heads = {d for shape in layer.local for d in shape[1 if layer.op == "gated_delta" else 2 :]}
    if strange := sorted(heads - set(spec.sizes)) if spec.sizes else []:
        return f"is made for heads of {', '.join(map(str, spec.sizes))}, not of {strange[0]}"
    if layer.op == "attention" and spec.sizes and kv > 2:
        return f"reads a KV cache of 8 or 16 bits, not of {8 * kv}"
    if layer.op == "attention" and spec.sizes and any(q > 16 * keys for q, keys, _ in layer.local):
        return "serves up to 16 query heads with one key head"
    if spec.routes and (layer.top_k > MOST_CHOSEN or layer.shape[0] > 1024):
        return f"chooses up to {MOST_CHOSEN} of 1024 experts, not {layer.top_k} of {layer.shape[0]}"
    if spec.routes and max(layer.local[0][-2:]) > WIDEST:
        return f"reads experts up to {WIDEST} wide, not {' x '.join(map(str, layer.local[0][-2:]))}"
    return None if installed(spec.module) else f"is not installed ({__package__}.{spec.module})"


def unproven(spec: KernelSpec) -> str | None:
    """Why a row waits to be asked for by name: nobody has seen its numbers on a GPU yet, or what they do to a model."""
    why = None if spec.status in (TESTED, REFERENCE) else f"is {spec.status}"
    if why is None and spec.input != "high":
        why = f"quantizes its input to {spec.input}, which no trained model has been judged with"
    few = f" (with another for more than {spec.tokens[1]} tokens)" if spec.tokens[1] < KernelSpec.tokens[1] else ""
    return why and f"{why}; --kernel {spec.op}={spec.name}{few} asks for it"


@dataclass(frozen=True)
class Cost:
    """us: expected. floor_us: no kernel on this machine can be faster. bound: by "memory", "compute" or "launch"."""

    bytes: float
    flops: float
    us: float
    floor_us: float
    bound: str


@dataclass(frozen=True)
class Batch:
    """tokens of a step, of how many sequences, each with `context` tokens before it; item: bytes of an activation, kv
    of an element of the cache. least, most: fewest and most tokens that the same kernel is to run, 0 for just these."""

    tokens: int
    sequences: int
    context: int
    item: int
    kv: int
    least: int = 0
    most: int = 0


def work(layer: LayerDesc, batch: Batch) -> tuple[float, float, float, float]:
    """Bytes that must move, FLOPs, weights that are read, experts that are hit, all on the rank with the most.

    Experts: routing is taken as uniform, so T tokens hit E (1 - (1 - k/E)^T) of E, and ranks share them evenly."""
    t = min(batch.tokens, batch.sequences) if layer.scored else batch.tokens
    if layer.op == "linear":
        n, k = layer.local[0]
        return layer.weight_bytes + t * (n + k) * batch.item, 2.0 * t * n * k, n * k, 0
    if layer.op in EXPERTS:
        held, i, h = layer.local[0]
        each = EXPERTS[layer.op] * i * h
        hit = held * (1 - (1 - layer.top_k / layer.shape[0]) ** t)
        flops = 2.0 * each * t * layer.top_k * held / layer.shape[0]
        return hit / held * layer.weight_bytes + 2 * t * h * batch.item, flops, hit * each, hit
    if layer.op == "embedding":
        return t * layer.local[0][1] * (layer.formats[0].bits / 8 + batch.item), 0, 0, 0
    if layer.op == "attention":
        q, kv, d = layer.local[0]
        own = t / batch.sequences  # tokens of one sequence in this step; each sees those before it
        cached = batch.sequences * (batch.context + own) * 2 * kv * d * batch.kv
        return cached + 2 * t * q * d * batch.item, 4.0 * t * q * d * (batch.context + (own + 1) / 2), 0, 0
    n, dk, dv = layer.local[0]
    state = batch.sequences * n * dk * dv * 8
    if layer.op == "mamba2":  # a head's input, gate and output; B and C are shared by many
        return state + t * n * 3 * dk * batch.item, 6.0 * t * n * dk * dv, 0, 0
    return state + t * n * (2 * dk + 2 * dv) * batch.item, 8.0 * t * n * dk * dv, 0, 0


def rate(hw: Hardware, input: str) -> float:
    """FLOP/s of products whose operands are `input` ("high", "none", "fp8", "nvfp4"), in the best units for them."""
    return {"fp8": hw.fp8, "nvfp4": hw.fp4}.get(input) or hw.bf16 or hw.f32


def products(spec: KernelSpec, layer: LayerDesc, flops: float, hit: float) -> float:
    """FLOPs over the share of the machine's rate that `spec` runs them at, of a layer of matrices. More tokens never
    need fewer: they count as much as the most that smaller cuts take."""
    *held, n, k = layer.local[0]
    sizes = [(n, k)] * (EXPERTS[layer.op] - 1) + [(k, n)] if held else [(n, k)]
    matrices, most = (hit if held else 1), 0.0
    each = flops / 2 / (n * k * len(sizes)) / matrices  # tokens that one of the matrices meets
    for cut in spec.cuts:
        tokens = min(each, cut.most)
        block = cut.tokens or tokens
        # Tokens spread over experts: of each one's last block half is empty.
        blocks = max(1.0, tokens / block + 0.5 * (cut.tokens > 0)) if held else math.ceil(tokens / block)
        run = sum((k + cut.columns) * (n * matrices * blocks + cut.rows) for n, k in sizes)
        most = max(most, 2 * block * run / cut.compute)
        if each <= cut.most:
            break
    return most


def estimate(spec: KernelSpec, layer: LayerDesc, hw: Hardware, batch: Batch) -> Cost:
    """What `spec` takes for one step of `layer`. What it waits for overlaps in part: the root of the sum of squares.
    More bandwidth never makes it slower, more work never faster."""
    moved, flops, weights, hit = work(layer, batch)
    inputs = flops / 2 / layer.local[0][0] if layer.op == "linear" else 0
    memory = (moved + spec.extra[0] * weights + spec.extra[1] * inputs) / (hw.bandwidth * spec.memory) * 1e6
    run = products(spec, layer, flops, hit) if weights else flops / spec.cuts[-1].compute
    best = rate(hw, spec.input)
    compute = run / (hw.f32 if spec.f32 else DECODING * hw.f32 if spec.decodes else best) * 1e6
    if spec.decodes:
        compute = math.hypot(compute, flops / best * 1e6)
    launch = (spec.launches[0] + spec.launches[1] * hit) * LAUNCH_US[hw.sm == 0]
    bound = max((memory, "memory"), (compute, "compute"), (launch, "launch"))[1]
    asked = {f.activation for f in layer.formats}
    most = max(rate(hw, "high"), rate(hw, asked.pop()) if len(asked) == 1 else 0)  # what the layer's inputs allow
    floor = max(moved / hw.bandwidth, flops / most) * 1e6
    us = math.hypot(memory, compute) + launch if spec.module else floor
    return Cost(moved, flops, us, floor, bound)
