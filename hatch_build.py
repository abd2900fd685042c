"""Make the Python side of Vitess' messages from their .proto, when tailrace is built or installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROTO = Path("tailrace/sources/vitess/connection/vstream.proto")


class ProtoBuildHook(BuildHookInterface):  # type: ignore[type-arg] # hatchling's own has a parameter for its settings
    """Runs protoc, which grpcio-tools brings, over the one .proto there is."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write `vstream_pb2.py` and its types beside the .proto, and have the wheel take them."""
        from grpc_tools import protoc

        sources = Path(self.root) / "src"
        arguments = [f"-I{sources}", f"--python_out={sources}", f"--pyi_out={sources}", str(sources / PROTO)]
        if protoc.main(["protoc", *arguments]) != 0:
            raise RuntimeError(f"protoc could not make Python of {PROTO}")
        build_data["artifacts"] += [f"/src/{PROTO.parent}/vstream_pb2.{ending}" for ending in ("py", "pyi")]
