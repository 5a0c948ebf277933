"""Another dataset for the same code, by other defaults alone: what hermes-agent's tblite_env does."""

from __future__ import annotations

from pydantic import Field

from tests.env.upstream.terminalbench_2 import TerminalBench2EvalConfig, TerminalBench2EvalEnv


class TBLiteEvalConfig(TerminalBench2EvalConfig):
    dataset_name: str = Field(default="some/tblite", description="The tasks.")
    task_timeout: int = Field(default=1200, description="Seconds of a task.")


class TBLiteEvalEnv(TerminalBench2EvalEnv):
    name = "openthoughts-tblite"
    env_config_cls = TBLiteEvalConfig


if __name__ == "__main__":
    TBLiteEvalEnv.cli()
