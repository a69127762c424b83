"""`baton lora`: what operators see, and its exit codes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
import yaml

from baton.cli.main import main
from baton.wire.server.fault_barrier import FaultBarrier
from baton.wire.server.server import RpcServer
from baton.wire.services.operator_service import MoveHandler, OperatorHandler, OperatorServicer, SteeringHandler
from tests.doubles.fake_adapter_handler import FakeAdapterHandler
from tests.support.adapter_files import write_simple_adapter


@asynccontextmanager
async def router() -> AsyncIterator[str]:
    """The address of a router that knows about adapters only."""
    server = RpcServer((), FaultBarrier())
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    nothing = cast(OperatorHandler, None), cast(SteeringHandler, None)
    OperatorServicer(*nothing, FakeAdapterHandler(), cast(MoveHandler, None)).add_to_server(server.server)
    await server.start()
    yield address
    await server.stop(0)


async def test_adapters_are_loaded_listed_and_unloaded(capsys: pytest.CaptureFixture[str]) -> None:
    async with router() as address:

        async def baton(*words: str) -> tuple[int, str, str]:
            code = await asyncio.to_thread(main, ["lora", *words, "--address", address])
            out, err = capsys.readouterr()
            return code, out, err

        assert await baton("list") == (0, "NAME   DIGEST   NODES   REFUSED   DIRECTORY\n", "")
        assert await baton("load", "one", "/srv/one") == (0, "one is served: aaaaaaaaaaaa, rank 8, 1.0 KiB\n", "")
        code, out, err = await baton("load", "one", "/srv/one", "--replace")
        assert (code, out) == (0, "one has this adapter already: aaaaaaaaaaaa, rank 8, 1.0 KiB\n")
        assert err == "baton: warning: not served by d1: /x is not there\n"
        assert await baton("load", "two", "/bad") == (1, "", "baton: p1: /bad is unsound\n")
        code, out, err = await baton("list")
        assert (code, out.splitlines()[1].split()) == (0, ["one", "aaaaaaaaaaaa", "p1", "1", "/srv/one"])
        assert err == "baton: one is refused by d1: why\n"
        (row,) = json.loads((await baton("list", "-o", "json"))[1])["items"]
        (same,) = yaml.safe_load((await baton("list", "-o", "yaml"))[1])["items"]
        assert row == same
        assert row["refusals"] == [{"node": "d1", "reason": "why"}]
        loaded = json.loads((await baton("load", "one", "/srv/one", "-o", "json"))[1])
        assert (loaded["name"], loaded["unchanged"]) == ("one", True)
        assert await baton("unload", "one") == (0, "one is not served any more\n", "")
        assert await baton("unload", "one") == (3, "", "baton: no adapter has the name 'one'\n")


def test_an_adapter_on_this_machine_is_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_simple_adapter(tmp_path / "one")
    assert main(["lora", "inspect", str(one)]) == 0
    assert "Rank:       4\n" in capsys.readouterr().out
    assert main(["lora", "inspect", str(one), "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rank"], found["num_modules"], len(found["digest"])) == (4, 1, 64)
    assert main(["lora", "inspect", str(tmp_path / "none")]) == 1
    assert "there is no directory" in capsys.readouterr().err
