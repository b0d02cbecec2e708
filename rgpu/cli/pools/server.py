"""``rgpu server``: one node daemon, in the foreground."""

from __future__ import annotations

from pathlib import Path

import click

from rgpu.api.settings import BOXES, POLICIES, parse_size
from rgpu.cli import common
from rgpu.cli.pool import pool_files
from rgpu.session.errors import NotFound, UsageError


@click.command("server")
@click.option("--host", required=True, metavar="NAME", help="This node's name in the pool.")
@click.option("--device", "devices", multiple=True, default=("cpu",), metavar="DEV", show_default=True,
              help="cpu, cpu:1, cuda:0, …; repeat for several devices.")
@click.option("--device-memory", metavar="SIZE", default="8GiB", show_default=True,
              help="Device memory that a cpu device offers.")
@common.module_cache_option
@common.store_options
@click.option("--listen", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--control-port", default=0, help="Port for control; 0: any free one.")
@click.option("--data-port", default=0, help="Port for calls and pages; 0: any free one.")
@click.option("--advertise-data", default="", metavar="HOST:PORT",
              help="Where agents and nodes reach the data port, if not at --listen (NAT, a proxy).")
@click.option("--warm-workers", "--spares", "spares", metavar="N|auto",
              help="Warm workers for each device, so that sessions begin and recover sooner: a number, "
                   "or as many as memory and processors allow, one at least (default: auto; RGPU_SPARES).")
@click.option("--checkpoint-bandwidth", metavar="SIZE",
              help="Bytes a second that all checkpoints of this node may write together, shared fairly; 0: no limit "
                   "(RGPU_CHECKPOINT_BANDWIDTH).")
@click.option("--enforce-compute", type=click.Choice(POLICIES),
              help="Hold sessions to their shares of a device's time: while it is shared, always or never "
                   "(default: shared; RGPU_ENFORCE_COMPUTE).")
@click.option("--box", type=click.Choice(BOXES),
              help="Walls around each worker: those that this host allows, none, or all (else no start) "
                   "(default: auto; RGPU_BOX; docs/operators/box.md).")
@click.option("--worker-uids", metavar="FIRST-LAST", help="User ids not used otherwise, one for each worker; they also "
              "allow namespaces. Needs root (RGPU_WORKER_UIDS).")
@click.option("--worker-memory", metavar="SIZE",
              help="Host memory that a worker may have (default: nearly all; RGPU_WORKER_MEMORY).")
@click.option("--worker-io", metavar="SIZE",
              help="Bytes a second that a worker may read, and as many that it may write, of the disks under the "
                   "node's folders (default: no bound; RGPU_WORKER_IO).")
@click.option("--mps", type=click.IntRange(0, 100), default=0, metavar="PERCENT", envvar="RGPU_MPS",
              help="Workers share GPUs by an MPS server of this node rather than in turns, and none may use more than "
                   "that of a GPU's multiprocessors; 0: no MPS (RGPU_MPS; docs/operators/requests.md).")
@click.option("--cgroup", default="", metavar="DIR", help="A control group (v2) that this node may divide among its "
              "workers (default: the daemon's own, where it may).")
@click.option("--client-grace", metavar="AGE", help="How long a client's host may be silent before its session is "
              "checkpointed and ended, if `rgpu run` set none (default: 10m; RGPU_CLIENT_GRACE). The same on all.")
@click.option("--lease", default=5.0, show_default=True, help="Seconds after which this node, if silent, is dead.")
@common.registry_option
@click.option("--coordinator", type=click.Choice(["auto", "never", "only"]), default="auto", show_default=True,
              help="Whether this node may be elected coordinator; only: it may, and has no devices.")
@click.option("--metrics", default="", metavar="HOST:PORT", help="Answer Prometheus there (docs/operators/metrics.md).")
@click.option("--web", default="", metavar="HOST:PORT", help="Serve the web page there (docs/operators/web.md).")
@click.option("--web-url", default="", metavar="URL", help="Where browsers reach it, if not there: behind a proxy with "
              "TLS.")
@click.option("--metrics-cert", type=click.Path(dir_okay=False, path_type=Path), help="Certificate (PEM, its chain "
              "after it) for --metrics: TLS only. Read again when it changes.")
@click.option("--metrics-key", type=click.Path(dir_okay=False, path_type=Path), help="The certificate's key (PEM, "
              "mode 0600).")
@click.option("--metrics-token-file", type=click.Path(dir_okay=False, path_type=Path), help="File (mode 0600) with the "
              "token that a scrape must show (Authorization: Bearer). Read again when it changes.")
@click.option("--join", "token", metavar="TOKEN", envvar="RGPU_JOIN", show_envvar=True,
              help="Join a pool by the invitation that `rgpu keys invite` printed; afterwards it is not needed.")
@common.local_pool_option
@common.verb
def command(host: str, devices: tuple[str, ...], device_memory: str, module_cache_size: str, store: str | None,
            store_credentials: str | None, keep_images: str | None, listen: str, control_port: int, data_port: int,
            advertise_data: str, spares: str | None, checkpoint_bandwidth: str | None, enforce_compute: str | None,
            box: str | None, worker_uids: str | None, worker_memory: str | None, worker_io: str | None,
            mps: int, cgroup: str, client_grace: str | None, lease: float, registry: str | None, coordinator: str,
            metrics: str, web: str, web_url: str,
            metrics_cert: Path | None, metrics_key: Path | None, metrics_token_file: Path | None,
            token: str | None, pool: str | None) -> None:
    """Run a node daemon of the pool on this host until SIGTERM.

    When SIGTERM stops it, it leaves the pool, and its sessions are recovered on other
    nodes; when it is killed, its workers run on and a restarted daemon takes them over.
    """
    from rgpu.server.box.walls import Mode
    from rgpu.server.node import belonging
    from rgpu.server.node.daemon import run
    from rgpu.server.node.metrics import parse_address
    from rgpu.server.node.options import Options
    from rgpu.server.node.ports import web_page
    from rgpu.server.node.ports.scrape_guard import ScrapeOptions, check_files
    from rgpu.server.node.workers.boxes import parse_users

    settings = common.settings(pool=pool, registry=registry, store=store, store_credentials=store_credentials,
                               keep_images=keep_images, spares=spares,
                               checkpoint_bandwidth=checkpoint_bandwidth, enforce_compute=enforce_compute,
                               client_grace=client_grace, box=box, worker_uids=worker_uids,
                               worker_memory=worker_memory, worker_io=worker_io)
    said = common.registry_address(settings)
    credentials = Path(settings.store_credentials).expanduser() if settings.store_credentials else None
    files = pool_files(settings)
    if token:
        from rgpu.server.node.joining import join

        join(files, host, token)
    if not files.description_path.exists():
        raise NotFound(f"there is no pool in {files.root}; `rgpu up` or `rgpu keys init` makes one, and an "
                       "invitation (`rgpu keys invite` there, --join here) lets this host into another")
    if settings.given("registry"):
        said = said or "embedded"
    address = belonging.choose(said, belonging.look(files, host))
    scraping = ScrapeOptions(metrics, metrics_cert, metrics_key, metrics_token_file)
    check_files(scraping)
    if metrics:
        parse_address(metrics)
    web_page.check(web, web_url)
    if mps and settings.worker_uids:
        raise UsageError("--mps and --worker-uids exclude each other: an MPS server serves one user at a time")
    if coordinator == "only":
        devices = ()
    run(Options(files=files, host=host, devices=devices, device_memory=parse_size(device_memory), listen=listen,
                control_port=control_port, data_port=data_port, lease=lease, coordinator=coordinator != "never",
                registry=address, metrics=scraping, web=web, web_url=web_url, log_level=settings.log_level,
                advertise_data=advertise_data, spares=settings.spares,
                checkpoint_bandwidth=settings.checkpoint_bandwidth, enforce_compute=settings.enforce_compute,
                module_cache_size=parse_size(module_cache_size), store=settings.store, store_credentials=credentials,
                keep_images=settings.keep_images, box=Mode(settings.box), worker_uids=parse_users(settings.worker_uids),
                worker_memory=settings.worker_memory, worker_io=settings.worker_io, mps=mps, cgroup=cgroup,
                client_grace=settings.client_grace))
