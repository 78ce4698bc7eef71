"""The sources of seven programs call nothing of FSDP2 that the table of calls has no row for; see ``program_table``."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.torch_impl.program_calls import calls_in
from tests.support.torch_impl.program_table import PROGRAM_CALLS, PROGRAMS

# Where `make test-programs` puts packages.
FOLDERS = (
    Path(sysconfig.get_path("purelib")),
    Path(sys.prefix) / "torchtune",
    Path(sys.prefix) / "program-sources",
)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_call_in_the_sources_of_a_program_has_a_row(program: str) -> None:
    roots = [folder / name for folder in FOLDERS for name in PROGRAMS[program] if (folder / name).is_dir()]
    if len(roots) < len(PROGRAMS[program]):
        pytest.skip(f"{program} is not there: make test-programs")
    known = {call.name for call in PROGRAM_CALLS if program in call.used_at}
    uses = {name: where for root in roots for name, where in calls_in(root).items()}
    assert len(uses) > 5, "nothing was read"
    assert {name: where for name, where in uses.items() if name not in known} == {}


def test_names_are_read_from_every_way_to_write_them(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel\n"
        "from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam\n"
        "from torch.distributed.fsdp.wrap import enable_wrap\n"
        "from torch.distributed.checkpoint.state_dict import set_model_state_dict\n"
        "options = {'mesh': mesh, 'other': 1}\n"
        "options['ignored_params'] = params\n"
        "fully_shard(model, mp_policy=policy, strategy='optim', **options)\n"
        "model.set_requires_gradient_sync(False)\n"
        "distribute_tensor(whole.full_tensor(), mesh, placements)\n"
    )
    (tmp_path / "template.py").write_text("import {{ fsdp }}\n")
    assert set(calls_in(tmp_path)) == {
        "fsdp.FSDPModule",
        "fsdp.FSDPParam",
        "state_dict.set_model_state_dict",
        "fully_shard(mesh=)",
        "fully_shard(ignored_params=)",
        "fully_shard(mp_policy=)",
        ".set_requires_gradient_sync()",
        "DTensor.distribute_tensor",
        "DTensor.full_tensor",
    }
