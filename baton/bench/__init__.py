"""The measuring harness: loads on live clusters, microbenchmarks, a simulator, and reports.

`config` has what each benchmark may be told; `workloads` and `load` make the load; `nodes`, `compare`, `validate` and
`overload` are experiments on real clusters, which `live_cluster` starts and finds; `micro` measures single parts;
`simulator` computes the same in virtual time; all write `results`, of which `report` makes a page. Nothing that serves
imports from here.
"""
