"""What the nodes' metrics pages say while a prompt is handed over."""

from __future__ import annotations

import asyncio
from pathlib import Path

from baton.engine.runner import SimulatedSpec, StepTime
from baton.engine.runner.simulated import SimulatedRunner
from baton.rpc.messages import GenerateRequest
from tests.support.mini_cluster import MiniCluster, mini_cluster, simulated_model_dir
from tests.support.step_gate import StepGate

SPEC = SimulatedSpec(num_blocks=96, vocab_size=256, max_model_len=512)


async def page(cluster: MiniCluster, node_id: str) -> dict[str, float]:
    """A node's samples."""
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.nodes[node_id].node.metrics_port)
    writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    body = (await reader.read()).decode().partition("\r\n\r\n")[2]
    writer.close()
    lines = (line.rpartition(" ") for line in body.splitlines() if not line.startswith("#"))
    return {sample: float(value) for sample, _, value in lines}


async def test_a_prompt_on_its_way_is_seen_on_both_sides(tmp_path: Path) -> None:
    simulated_model_dir(tmp_path, 256, 512)
    gate = StepGate(allowed=0)
    held = SimulatedSpec(num_blocks=96, vocab_size=256, max_model_len=512, step_time=StepTime(1.0), sleep=gate)

    def make_runner(node_id: str) -> SimulatedRunner:
        return SimulatedRunner(held if node_id.startswith("prefill") else SPEC)

    async with mini_cluster(make_runner, tmp_path, token_ids_only=True, metrics_port=0) as cluster:
        answer = asyncio.create_task(cluster.generate(GenerateRequest([1] * 40, temperature=0.0, max_tokens=4)))
        # Each look is a round trip, so nothing spins.
        while not any(event.name == "subscribed" for event in await cluster.trace("decode-0")):
            pass
        decode = await page(cluster, "decode-0")
        gate.allow(None)
        on_decode = '{{model_name="{}",node="decode-0",role="decode"{}}}'.format
        model = cluster.nodes["decode-0"].description.model
        stage = "baton_num_requests_kv_fetch_by_stage"
        assert decode[stage + on_decode(model, ',stage="waiting_to_start"')] == 1
        assert decode[stage + on_decode(model, ',stage="in_progress"')] == 0
        open_states = {',state="planned"', ',state="reserved"'}
        assert sum(decode["baton_kv_open_transfers" + on_decode(model, state)] for state in open_states) == 1
        assert decode["baton_kv_transfer_age_seconds" + on_decode(model, "")] > 0
        assert len((await answer).token_ids) == 4
        await cluster.idle()
        decode, prefill = await page(cluster, "decode-0"), await page(cluster, "prefill-0")
        assert decode[stage + on_decode(model, ',stage="waiting_to_start"')] == 0
        assert decode["baton_prefix_cache_hits_total" + on_decode(model, ',source="remote"')] == 40
        arrived = ',outcome="arrived",peer="prefill-0",role="decode"'
        assert decode[f'baton_kv_transfers_total{{model_name="{model}",node="decode-0"{arrived}}}'] == 1
        of_peer = ',peer="prefill-0",role="decode"'
        for figure in ("kv_transfer_bytes_total", "kv_handshake_seconds"):
            assert decode[f'baton_{figure}{{model_name="{model}",node="decode-0"{of_peer}}}'] > 0
        assert not any(decode["baton_kv_open_transfers" + on_decode(model, state)] for state in open_states)
        states = [value for sample, value in prefill.items() if sample.startswith("baton_kv_leases{")]
        assert states == [0, 0, 0]
