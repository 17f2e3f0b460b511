"""``mstar serve``: run a tritonserver with our models in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mstar.serving.launcher import LaunchOptions, launch

# What `app.command()` needs so that unknown options reach tritonserver.
CONTEXT_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}


def serve(
    context: typer.Context,
    repository: Annotated[Path, typer.Option(help="Model repository: a folder of model folders.")] = Path(
        "model_repository"
    ),
    model: Annotated[
        list[str] | None, typer.Option(help="Model to load; repeat for several. Default: every model folder.")
    ] = None,
    address: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    http_port: Annotated[int, typer.Option(help="HTTP port; 0 picks a free one.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC port; 0 picks a free one.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Port of /metrics; 0 picks a free one.")] = 8002,
    grace: Annotated[
        float, typer.Option(help="Seconds in which errors go out after an engine or a stub was lost, before exiting.")
    ] = 3.0,
    exit_timeout: Annotated[int, typer.Option(help="Seconds a drain may take (tritonserver's own limit).")] = 60,
    tritonserver: Annotated[
        Path | None,
        typer.Option(help="Server binary. Default: from PATH, /opt/tritonserver, or the nvidia-pytriton wheel."),
    ] = None,
    log_file: Annotated[Path | None, typer.Option(help="Append the server's output to this file.")] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="Write the addresses to this file as JSON when ready; removed at exit.")
    ] = None,
) -> None:
    """Start tritonserver on a model repository, print its addresses when ready, and stay until it ends.

    Ctrl-C (SIGINT) or SIGTERM drains and exits 0; a second one kills. If an engine process or a backend stub is lost,
    the exit code is 1, so that an orchestrator restarts it. Options not listed here, and all after `--`, go to
    tritonserver: `mstar serve --log-verbose=1`.
    """
    options = LaunchOptions(
        repository=repository,
        models=tuple(model or ()),
        address=address,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        grace_s=grace,
        exit_timeout_s=exit_timeout,
        binary=tritonserver,
        log_file=log_file,
        ready_file=ready_file,
        extra=tuple(context.args),
    )
    raise typer.Exit(launch(options))
