"""The options of `paceline run`, and the RunSpec that they make. run.py runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import kubernetes_options, ray_options, slurm_options


def run(
    context: typer.Context,
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A Python file, or with -m a module.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENTS]...", help="Passed to the script.")
    ] = None,
    num_workers: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--workers",
            metavar="N",
            help="Number of workers; default: the size of the mesh, the number of slots of the"
            " hosts, or 1.",
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads-per-worker", metavar="K", help="OMP_NUM_THREADS; default: cores / N."
        ),
    ] = None,
    servers: Annotated[
        str,
        typer.Option(
            "-s",
            "--servers",
            metavar="N|colocated",
            help="Number of parameter servers; colocated: one for each worker.",
        ),
    ] = "0",
    data_workers: Annotated[
        str,
        typer.Option(
            "--data-workers",
            metavar="N[,N...]",
            help="Number of processes that make batches for pl.shard(..., mode='pipeline');"
            " several numbers: one for each stage.",
        ),
    ] = "0",
    server_threads: Annotated[
        int | None,
        typer.Option(
            "--threads-per-server", metavar="K", help="Threads for large updates; default: 2."
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas", metavar="R", help="Number of servers that hold each value; default: 1."
        ),
    ] = None,
    max_servers: Annotated[
        int | None,
        typer.Option("--max-servers", metavar="M", help="Upper limit for `paceline servers add`."),
    ] = None,
    min_workers: Annotated[
        int | None,
        typer.Option("--min", metavar="N", help="Continue after losses with at least N workers."),
    ] = None,
    max_workers: Annotated[
        int | None,
        typer.Option("--max", metavar="N", help="Upper limit for `paceline scale` and `join`."),
    ] = None,
    on_loss: Annotated[
        str | None,
        typer.Option(
            "--on-loss",
            metavar="shrink|replace",
            help="If a worker is lost: continue without it until a replacement joins, or hold the"
            " step until a replacement has joined; default: shrink.",
        ),
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(
            "--restarts",
            metavar="N",
            help="If too few workers are left, restart all processes, at most N times; the script"
            " resumes from its last checkpoint. Default: 0.",
        ),
    ] = None,
    pace: Annotated[
        str | None,
        typer.Option(
            "--pace",
            metavar="PACE",
            help="When the workers agree, such as allreduce, 'allreduce[update=sharded]', or with"
            " servers ps, async, ssp:3; also a schedule, 'allreduce@0, local:8@500'; auto: measure"
            " the first steps, then choose. Overrides the script. `paceline paces` lists all paces"
            " with their options.",
        ),
    ] = None,
    max_wire: Annotated[
        str | None,
        typer.Option(
            "--max-wire",
            metavar="RATE",
            help="What each host may send to other hosts, such as 200mbit: after the first steps"
            " the pace gets a lower precision, a codec or more local steps to fit.",
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision",
            metavar="fp32|bf16|fp16",
            help="Precision in which models compute; parameters stay float32. Overrides the"
            " script.",
        ),
    ] = None,
    horovod: Annotated[
        bool,
        typer.Option("--horovod", help="`import horovod` in the script uses paceline.horovod."),
    ] = False,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            metavar="AXIS=N[,...]",
            help="How processes divide data (dp) and model (pp stages, fsdp shards, tp slices),"
            " such as dp=2,tp=2. Overrides the script.",
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            "--trace",
            metavar="FIRST:STOP",
            help="Write trace.json for Perfetto with these steps of all processes: 20:30 are steps"
            " 20 to 29. Also PACELINE_TRACE.",
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            metavar="auto|cpu|TYPE[:I,...]",
            help="Device of each worker: auto is an accelerator for each worker of a host, or the"
            " CPU where there is none; cuda:0,1 names them, and may name one twice. Also"
            " PACELINE_DEVICES.",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env", metavar="NAME=VALUE", help="Set a variable for every process; repeatable."
        ),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            "--log-dir",
            metavar="DIR",
            help="Directory for output, events and TensorBoard files; default:"
            " runs/<date>-<script>, none: keep nothing. Also PACELINE_LOG_DIR.",
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port",
            metavar="PORT",
            help="Serve metrics for Prometheus at 127.0.0.1:PORT; 0: any free port.",
        ),
    ] = None,
    grace_s: Annotated[
        float,
        typer.Option("--grace", metavar="S", help="Seconds from SIGTERM to SIGKILL; default: 3."),
    ] = 3.0,
    preemption_notice: Annotated[
        str | None,
        typer.Option(
            "--preemption-notice",
            metavar="SOURCE",
            help="What each host looks at for a notice that it goes away: file:/path, http://...,"
            " or the metadata address of aws, gcp or azure (aws=http://... for another address)."
            " Default: nothing.",
        ),
    ] = None,
    preemption_deadline: Annotated[
        str | None,
        typer.Option(
            "--preemption-deadline",
            metavar="TIME",
            help="How long a host has after a notice without a time, such as 30s or 2m; default:"
            " 30s, on Kubernetes 45s.",
        ),
    ] = None,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Run in the background; see `paceline attach`."),
    ] = False,
    no_template: Annotated[
        bool,
        typer.Option(
            "--no-template",
            help="Start each process as a fresh interpreter instead of forking it from one that"
            " has imported torch. Also PACELINE_TEMPLATE=off.",
        ),
    ] = False,
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts",
            metavar="HOST[:SLOTS],...",
            help="Run on these hosts, over ssh: a:4,b:4 has room for 4 workers on each. Default: on"
            " this machine.",
        ),
    ] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(
            "--hostfile",
            metavar="FILE",
            help="The same from a file, with lines such as `user@host:port slots=4`.",
        ),
    ] = None,
    servers_on: Annotated[
        str | None,
        typer.Option(
            "--servers-on",
            metavar="HOST,...",
            help="Hosts of the parameter servers; default: all that have workers.",
        ),
    ] = None,
    sync: Annotated[
        bool,
        typer.Option("--sync", help="Copy the working directory to the other hosts first."),
    ] = False,
    no_encrypt: Annotated[
        bool,
        typer.Option(
            "--no-encrypt",
            help="Do not encrypt connections between hosts. Also PACELINE_ENCRYPT=off.",
        ),
    ] = False,
    python: Annotated[
        str | None,
        typer.Option(
            "--python",
            metavar="PATH",
            help="Interpreter on the other hosts; default: PYTHON of the environment, or the path"
            " of this one.",
        ),
    ] = None,
    activate: Annotated[
        str | None,
        typer.Option(
            "--activate",
            metavar="LINE",
            help="Line that the shell of each other host runs first, such as"
            " '. venv/bin/activate'.",
        ),
    ] = None,
    on: slurm_options.On = None,
    nodes: slurm_options.Nodes = None,
    time: slurm_options.Time = None,
    partition: slurm_options.Partition = None,
    sbatch: slurm_options.Sbatch = None,
    image: kubernetes_options.Image = None,
    flavour: kubernetes_options.Flavour = None,
    namespace: kubernetes_options.Namespace = None,
    name: kubernetes_options.Name = None,
    cpus: kubernetes_options.Cpus = None,
    memory: kubernetes_options.Memory = None,
    gpus: kubernetes_options.Gpus = None,
    volume: kubernetes_options.Volumes = None,
    secret: kubernetes_options.Secret = None,
    retries: kubernetes_options.Retries = None,
    output: kubernetes_options.Output = None,
    resources: ray_options.Resources = None,
    placement: ray_options.Strategy = None,
    wait: ray_options.Wait = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run, and exit.")
    ] = False,
) -> None:
    from paceline.cli.dry_run import dry_run as print_plan
    from paceline.cli.run import run as run_job
    from paceline.launcher.engines.kubernetes.pods import kubernetes_hosts
    from paceline.launcher.engines.slurm_allocation import slurm_hosts
    from paceline.launcher.hosts.host_list import chosen_hosts, parse_host_names
    from paceline.launcher.hosts.placement import num_slots
    from paceline.launcher.job_size import parse_data_workers, plan_changes, plan_servers
    from paceline.launcher.preemption.notice import parse_duration
    from paceline.launcher.spec import RunSpec, parse_env
    from paceline.observe.telemetry.trace import TracedSteps
    from paceline.pace.parse import parse_schedule
    from paceline.runtime.config import HOROVOD, inherited_environ
    from paceline.runtime.device_request import parse_devices
    from paceline.runtime.mesh import Mesh

    grid = None if mesh is None else Mesh.parse(mesh)
    # The modules of their options read these from the context.
    del nodes, time, partition, sbatch, resources, placement, wait
    del image, flavour, namespace, name, cpus, memory, gpus, volume, secret, retries, output
    is_for_queue = slurm_options.check(context.params)
    is_for_pods = kubernetes_options.check(context.params)
    ray = ray_options.check(context.params)
    wanted = num_workers if grid is None or num_workers is not None else grid.num_workers
    if is_for_queue:
        asked = slurm_options.request(context.params, wanted, script)
        where, engine = asked.placeholders(), "slurm"
    elif is_for_pods:
        words = slurm_options.arguments(context, kubernetes_options.NOT_IN_PODS)
        asked = kubernetes_options.request(context.params, wanted, script, words)
        where, engine = asked.hosts(), "kubernetes"
        python = None  # it is that of the image
    else:
        where, engine = chosen_hosts(hosts, hostfile), "ssh"
    if not where and on is None:
        where, engine = kubernetes_hosts(inherited_environ()), "kubernetes"
    if not where and on is None:
        where, engine = slurm_hosts(inherited_environ()), "slurm"
    if num_workers is None:
        num_workers = num_slots(where) or 1 if grid is None else grid.num_workers
    if ray is not None:
        where, engine = ray.placeholders(num_workers), "ray"
    planned = plan_servers(
        servers, num_workers=num_workers, replicas=replicas, threads=server_threads
    )
    spec = RunSpec(
        target=script,
        arguments=tuple(arguments or ()),
        is_module=module,
        is_in_image=is_for_pods,
        num_workers=num_workers,
        threads_per_worker=threads,
        servers=planned,
        data_workers=parse_data_workers(data_workers),
        pace=None if pace is None else parse_schedule(pace),
        precision=precision,
        max_wire=max_wire,
        mesh=grid,
        trace=None if trace is None else TracedSteps.parse(trace),
        devices=None if devices is None else parse_devices(devices),
        env={**({HOROVOD: "1"} if horovod else {}), **parse_env(env or ())},
        log_dir=log_dir,
        metrics_port=metrics_port,
        elastic=plan_changes(
            num_workers=num_workers,
            servers=planned,
            min_workers=min_workers,
            max_workers=max_workers,
            max_servers=max_servers,
            on_loss=on_loss,
            restarts=restarts,
            mesh=grid,
            is_detached=detach,
            is_elastic=ray is not None and data_workers == "0",
        ),
        grace_s=grace_s,
        is_detached=detach,
        has_template=not no_template,
        hosts=where,
        engine=engine,
        ray=ray,
        servers_on=() if servers_on is None else parse_host_names(servers_on, "--servers-on"),
        sync=sync,
        encrypt=not no_encrypt,
        remote_python=python,
        activate=activate,
        preemption_notice=preemption_notice or "",
        preemption_deadline_s=None
        if preemption_deadline is None
        else parse_duration(preemption_deadline, "--preemption-deadline"),
        given=_given(context),
    )
    if is_for_queue:
        raise typer.Exit(slurm_options.submit(context, asked))
    if is_for_pods:
        raise typer.Exit(kubernetes_options.submit(context, asked))
    raise typer.Exit(print_plan(spec) if dry_run else run_job(spec))


def _given(context: typer.Context) -> frozenset[str]:
    """Return the parameters given on the command line; the others have their defaults."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(
        name for name, source in sources.items() if source and source.name != "DEFAULT"
    )
