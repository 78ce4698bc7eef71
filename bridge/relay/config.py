"""The configuration of a relay: model, data, optimizer and legs, read from a TOML file and validated once."""

from __future__ import annotations

import dataclasses
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bridge.core.dtype_names import full_name
from bridge.core.sharding import PolicyError, ShardingPolicy
from bridge.core.sharding.policy.optimizer_state import MOMENTS
from bridge.core.text_files import MAX_TOML, load_toml, parse_toml, read_text
from bridge.relay.corpus import VOCABULARY

FRAMEWORKS = ("torch", "jax")
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
PRECISIONS = ("float32", "bfloat16")
# The short form of a policy.
SHORT = ("strategy", "precision", "granularity")
GRANULARITY = r"row|tensor|block\([1-9][0-9]*\)"
# The JAX runtime tabulates powers of the betas until they vanish, after at most 2**22 steps.
LARGEST_BETA = 2.0 ** (-56 / (2**22 - 1))
BUILT_IN = Path(__file__).parent / "configs"
POLICIES = Path(__file__).parents[1] / "core" / "sharding" / "policies"


class ConfigError(ValueError):
    """A relay file that cannot run; the text names the table and key and says what was expected."""


def _in(where: str) -> Callable[[str], ConfigError]:
    return lambda text: ConfigError(f"{where}: {text}")


def _require(condition: bool, where: str, expected: str, got: object) -> None:
    if not condition:
        raise ConfigError(f"{where}: expected {expected}, got {got!r}")


def _whole(where: str, value: object, least: int = 1) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
    _require(is_whole, where, f"a whole number >= {least}", value)


@dataclass(frozen=True)
class ModelConfig:
    """The decoder that both frameworks build; sizes in elements.

    The fields are those of the runtimes' ``DecoderConfig`` without ``norm_eps``, which keeps its default.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: int = 10000
    tied: bool = False

    def __post_init__(self) -> None:
        for size in dataclasses.fields(self):
            if size.name != "tied":
                _whole(f"[model] {size.name}", getattr(self, size.name))
        _require(isinstance(self.tied, bool), "[model] tied", "true or false", self.tied)
        _require(
            self.vocab_size >= VOCABULARY, "[model] vocab_size", f"at least {VOCABULARY}", self.vocab_size
        )
        _require(self.head_dim % 2 == 0, "[model] head_dim", "an even number", self.head_dim)
        heads = f"a multiple of n_kv_heads = {self.n_kv_heads}"
        _require(self.n_heads % self.n_kv_heads == 0, "[model] n_heads", heads, self.n_heads)

    def as_train_state(self) -> dict[str, int]:
        """The fields as integers, as a checkpoint's ``train.model`` holds them."""
        return {name: int(value) for name, value in dataclasses.asdict(self).items()}


@dataclass(frozen=True)
class DataConfig:
    """``batch`` sequences of ``length`` tokens form a global batch; ``seed`` sets the order and the initial weights.

    ``init_scale`` multiplies the initial matrices. With the decoder's own initialization, scores are so small that
    attention is nearly uniform, and a fault in attention hardly shows.
    """

    seed: int
    batch: int
    length: int
    init_scale: float = 1.0

    def __post_init__(self) -> None:
        _whole("[data] seed", self.seed, 0)
        # A checkpoint holds it as a signed integer of 64 bits.
        _require(self.seed < 2**63, "[data] seed", "less than 2**63", self.seed)
        _whole("[data] batch", self.batch)
        _whole("[data] length", self.length)
        scale = self.init_scale
        positive = isinstance(scale, (int, float)) and 0 < scale <= sys.float_info.max
        _require(positive, "[data] init_scale", "a finite number > 0", scale)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW's hyperparameters, as in ``torch.optim.AdamW``."""

    lr: float
    betas: tuple[float, float]
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        betas = self.betas
        pair = isinstance(betas, (list, tuple)) and len(betas) == 2
        in_range = pair and all(isinstance(beta, (int, float)) and 0 <= beta < 1 for beta in betas)
        _require(in_range, "[optimizer] betas", "two numbers in [0, 1)", betas)
        _require(
            max(betas) <= LARGEST_BETA, "[optimizer] betas", f"two numbers up to {LARGEST_BETA:.7f}", betas
        )
        object.__setattr__(self, "betas", tuple(betas))
        for name in ("lr", "eps", "weight_decay"):
            value = getattr(self, name)
            finite = isinstance(value, (int, float)) and 0 <= value <= sys.float_info.max
            _require(finite, f"[optimizer] {name}", "a finite number >= 0", value)


@dataclass(frozen=True)
class LegPolicy:
    """A sharding policy in the form that a leg's processes get: the text of a file, which only the runtimes parse.

    name: the policy's name in titles. source: its name in errors.
    """

    name: str
    source: str
    text: str

    @staticmethod
    def read(name_or_path: object, folder: Path) -> LegPolicy:
        """A shipped policy by its name, or a file by its path from ``folder``."""
        where = "[[leg]] policy"
        shipped = sorted(path.stem for path in POLICIES.glob("*.toml"))
        expected = f"one of {', '.join(shipped)} or the path of a policy file from {folder}"
        _require(isinstance(name_or_path, str) and name_or_path != "", where, expected, name_or_path)
        name = str(name_or_path)
        path = POLICIES / f"{name}.toml" if name in shipped else folder / name
        try:
            text = read_text(path, _in(f"{where} {name_or_path!r}"), most=MAX_TOML, expected="a TOML file")
            parse_toml(text, str(path), _in(f"{where} {name_or_path!r}"))
        except OSError as error:
            raise ConfigError(
                f"{where}: expected {expected}, got {name_or_path!r}: {error.strerror}"
            ) from error
        return LegPolicy(path.stem, path.name if name in shipped else str(path), text)

    @staticmethod
    def of_strategy(strategy: str, granularity: str, precision: str) -> LegPolicy:
        """One strategy for a decoder's layers and its root."""
        lines = ["[precision]", f'compute = "{precision}"', 'reduce = "float32"']
        for match in ("layers.*", ""):
            lines += ["[[unit]]", f'match = "{match}"']
            lines += [f'strategy = "{strategy}"', f'granularity = "{granularity}"']
        return LegPolicy(strategy, f"strategy {strategy}", "\n".join(lines) + "\n")

    @property
    def compute(self) -> str:
        """The dtype of forward and backward; the default if the text is no policy, which the rehearsal will report."""
        return self._dtype("compute") or self._dtype("main") or "float32"

    @property
    def gather(self) -> str | None:
        """The format in which weights are gathered, if it differs from the dtype of forward and backward."""
        return self._dtype("gather")

    def _dtype(self, key: str) -> str | None:
        precision = tomllib.loads(self.text).get("precision")
        dtype = precision.get(key) if isinstance(precision, dict) else None
        return dtype if isinstance(dtype, str) else None

    def data_ranks(self, ranks: int) -> int:
        """How many of ``ranks`` share a global batch; all ranks if the policy does not fit, see ``compute``."""
        try:
            return ShardingPolicy.parse(self.text, self.source).data_ranks(ranks)
        except PolicyError:
            return ranks


@dataclass(frozen=True)
class Leg:
    """One stretch of training by one framework; ``ranks`` counts torch processes or JAX devices.

    ``policy`` gives the sharding. The short form is ``strategy`` with the optional keys ``precision`` (default
    "float32") and ``granularity`` (default "row").

    moments: the dtype in which both Adam moments are stored; a leg converts moments that have another dtype.
    offload: the share of the moments in CPU memory, 0 to 1.
    """

    framework: str
    ranks: int
    strategy: str | None = None
    steps: int = field(kw_only=True)
    precision: str | None = None
    microbatches: int = 1
    granularity: str | None = None
    policy: LegPolicy | None = None
    moments: str = "float32"
    offload: float = 0.0

    def __post_init__(self) -> None:
        frameworks = f"one of {', '.join(FRAMEWORKS)}"
        _require(self.framework in FRAMEWORKS, "[[leg]] framework", frameworks, self.framework)
        for name in ("ranks", "steps", "microbatches"):
            _whole(f"[[leg]] {name}", getattr(self, name))
        for name, dtypes in (("moments", MOMENTS), ("precision", PRECISIONS)):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, full_name(getattr(self, name), dtypes))
        _require(self.moments in MOMENTS, "[[leg]] moments", f"one of {', '.join(MOMENTS)}", self.moments)
        share = self.offload
        part = isinstance(share, (int, float)) and not isinstance(share, bool) and 0 <= share <= 1
        _require(part, "[[leg]] offload", "a share of the moments, 0 to 1", share)
        if self.policy is not None:
            short_keys = [name for name in SHORT if getattr(self, name) is not None]
            expected = f"only policy, which replaces {', '.join(SHORT)}"
            _require(not short_keys, "[[leg]] policy", expected, f"also {', '.join(short_keys)}")
            return
        _require(self.strategy is not None, "[[leg]]", "the key policy, or strategy in its place", "neither")
        for name, allowed in (("strategy", STRATEGIES), ("precision", PRECISIONS)):
            value = getattr(self, name)
            legal = value in allowed or (value is None and name == "precision")
            _require(legal, f"[[leg]] {name}", f"one of {', '.join(allowed)}", value)
        cut = self.granularity
        known = cut is None or (isinstance(cut, str) and re.fullmatch(GRANULARITY, cut) is not None)
        _require(known, "[[leg]] granularity", "row, block(n) or tensor", cut)

    @staticmethod
    def of_json(table: Mapping[str, Any]) -> Leg:
        """The leg from the result of ``dataclasses.asdict``."""
        policy = table["policy"]
        return Leg(**{**table, "policy": None if policy is None else LegPolicy(**policy)})

    @property
    def sharding(self) -> LegPolicy:
        """The policy, from a policy file or from the short form."""
        if self.policy is not None:
            return self.policy
        assert self.strategy is not None
        return LegPolicy.of_strategy(self.strategy, self.granularity or "row", self.precision or "float32")

    @property
    def title(self) -> str:
        return f"{self.framework} x{self.ranks} {self.sharding.name}"

    @property
    def precision_words(self) -> tuple[str, ...]:
        """The parts of the leg that are coarser than float32, one word each: compute, gathered weights, moments."""
        weights = self.sharding
        words = [weights.compute] if weights.compute != "float32" else []
        if weights.gather is not None and weights.gather != weights.compute:
            words.append(f"{weights.gather} weights")
        if self.moments != "float32":
            words.append(f"{self.moments} moments")
        return tuple(words)


@dataclass(frozen=True)
class RelayConfig:
    """A whole relay. Raises ``ConfigError`` when a leg's data ranks and microbatches do not divide the global batch.

    repeats: how often the fp32 reference runs again, with only the rounding changed. The repeats give the band in which
    the legs' losses must stay. At least 2, or 0 for none.
    """

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    legs: tuple[Leg, ...]
    repeats: int = 0

    def __post_init__(self) -> None:
        _whole("repeats", self.repeats, 0)
        _require(self.repeats != 1, "repeats", "0, or at least 2, as one shows no spread", self.repeats)
        _require(len(self.legs) > 0, "relay", "at least one [[leg]]", len(self.legs))
        for number, leg in enumerate(self.legs, 1):
            ranks = leg.sharding.data_ranks(leg.ranks)
            parts = ranks * leg.microbatches
            _require(
                self.data.batch % parts == 0,
                f"leg {number} ({leg.title})",
                f"ranks x microbatches to divide the global batch of {self.data.batch} sequences",
                f"{ranks} x {leg.microbatches} = {parts}",
            )

    @property
    def steps(self) -> int:
        return sum(leg.steps for leg in self.legs)

    @staticmethod
    def load(name_or_path: str | Path) -> RelayConfig:
        """Read a TOML file, or a built-in relay by name (``default``, ``bfloat16``, ``float8``, ``quick``)."""
        built_in = BUILT_IN / f"{name_or_path}.toml"
        path = built_in if built_in.is_file() else Path(name_or_path)
        if not path.is_file():
            names = ", ".join(sorted(p.stem for p in BUILT_IN.glob("*.toml")))
            raise ConfigError(
                f"relay file {path}: expected a TOML file or one of {names}, found nothing there"
            )
        table = load_toml(path, lambda text: ConfigError(f"relay file {text}"))
        try:
            return RelayConfig.of(table, path.parent)
        except ConfigError as error:
            raise ConfigError(f"relay file {path}: {error}") from error

    @staticmethod
    def of(table: Mapping[str, Any], folder: Path = Path()) -> RelayConfig:
        """Build from a parsed TOML document in ``folder``; unknown and missing keys raise ``ConfigError``."""
        known = {"model", "data", "optimizer", "leg"}
        tables = f"the tables {', '.join(sorted(known))}, and in addition only the key repeats"
        _require(set(table) - {"repeats"} == known, "top level", tables, sorted(table))
        legs = table["leg"]
        _require(isinstance(legs, list), "leg", "[[leg]] tables", legs)
        return RelayConfig(
            _build(ModelConfig, "[model]", table["model"]),
            _build(DataConfig, "[data]", table["data"]),
            _build(OptimizerConfig, "[optimizer]", table["optimizer"]),
            tuple(_build(Leg, "[[leg]]", _with_policy(leg, folder)) for leg in legs),
            table.get("repeats", 0),
        )


def _with_policy(leg: object, folder: Path) -> object:
    """The table of a leg with its policy read."""
    if not isinstance(leg, Mapping) or "policy" not in leg:
        return leg
    return {**leg, "policy": LegPolicy.read(leg["policy"], folder)}


T = TypeVar("T", ModelConfig, DataConfig, OptimizerConfig, Leg)


def _build(table_class: type[T], where: str, table: object) -> T:
    _require(isinstance(table, Mapping), where, "a table", table)
    assert isinstance(table, Mapping)
    fields = {known.name: known for known in dataclasses.fields(table_class)}
    unknown = sorted(set(table) - set(fields))
    _require(not unknown, where, f"only the keys {', '.join(fields)}", unknown)
    missing = [
        name for name, known in fields.items() if known.default is dataclasses.MISSING and name not in table
    ]
    _require(not missing, where, f"the keys {', '.join(missing)}", sorted(table))
    return table_class(**table)
