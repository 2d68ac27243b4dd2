"""Observability of a job: events, display, run directory, report.

    telemetry/   events of running processes and their fold, RunState; imported everywhere
    display/     the live table and the closing summary
    record/      the run directory, TensorBoard files, the Prometheus endpoint
    report/      `paceline report`: one page about a run

Start with telemetry/events.py and telemetry/run_state.py. launcher/ connects the parts.
"""
