"""A cluster whose decode node has two ranks: what its commands and its metrics say of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from baton.bench.live_cluster import processes_of
from tests.support.process_cluster import process_cluster
from tests.support.rank_processes import command


def test_commands_and_metrics_show_the_ranks_of_a_node(tmp_path: Path, model: Path) -> None:
    flags = ("--threads", "2", "--decode-tp", "2", "--metrics-port", "0")
    with process_cluster(tmp_path / "run", model, *flags) as cluster:
        status = cluster.baton("status").stdout
        roles = {line.split()[0]: line.split()[-1] for line in status.splitlines() if line.endswith(("tp1", "tp2"))}
        assert roles == {"prefill": "tp1", "decode": "tp2"}
        report = json.loads(cluster.baton("describe", "node", "decode-0", "-o", "json").stdout)["report"]
        assert (report["description"]["tp"], report["description"]["pp"]) == (2, 1)
        pids = [rank["pid"] for rank in report["ranks"]]
        assert pids[0] == cluster.process("decode-0").pid
        # They are forked by a process that the node has been given for it; a node without ranks has none.
        assert set(pids) <= set(processes_of(pids[:1]))
        forking = [
            name
            for name in ("prefill-0", "decode-0")
            for pid in processes_of([cluster.process(name).pid])
            if command(pid)[:2] == ["baton", "fork-server"]
        ]
        assert forking == ["decode-0"]
        assert all(rank["is_up"] and rank["resident_bytes"] > 50 << 20 for rank in report["ranks"])
        # The KV cache of 256 MiB is one memory; the ranks have touched little of it.
        assert all(0 < rank["shared_bytes"] < rank["resident_bytes"] for rank in report["ranks"])
        url = re.search(r"http://\S+/metrics", (cluster.run_dir / "logs" / "decode-0.log").read_text())
        assert url is not None
        page = urlopen(url[0]).read().decode()
        up = {
            sample.labels["rank"]: sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == "baton_rank_up"
        }
        assert up == {"0": 1.0, "1": 1.0}
