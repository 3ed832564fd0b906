"""Draw the Pareto front as a PNG."""

from pathlib import Path

from kvmesh.profiler.picks import Picks
from kvmesh.protocol.errors import ConfigError


def draw_front(picks: Picks, path: Path) -> None:
    """Draw the front. Raise ConfigError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "pictures need matplotlib", hint="install it with `pip install 'kvmesh[plots]'`, or add --no-png"
        ) from error
    figure = Figure(figsize=(11, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for pair in sorted({(option.prefill_mapping, option.decode_mapping) for option in picks.options}):
        options = [o for o in picks.options if (o.prefill_mapping, o.decode_mapping) == pair]
        axes.scatter(
            [option.tokens_s_user for option in options],
            [option.tokens_s_gpu for option in options],
            s=12,
            alpha=0.6,
            label=f"{pair[0]} prefill, {pair[1]} decode",
        )
    front = [picks.options[i] for i in picks.front]
    users, gpus = [option.tokens_s_user for option in front], [option.tokens_s_gpu for option in front]
    axes.plot(users, gpus, color="black", linewidth=1, label="Pareto front")
    axes.axvline(1 / picks.goal.itl_slo_s, color="red", linestyle="--", linewidth=1, label="ITL of the SLO")
    if picks.recommended is not None:
        chosen = picks.options[picks.recommended]
        axes.plot(chosen.tokens_s_user, chosen.tokens_s_gpu, "r*", markersize=16, label=f"recommended: {chosen.title}")
    axes.set_xlabel("tokens/s/user")
    axes.set_ylabel("tokens/s/GPU")
    goal = picks.goal
    axes.set_title(f"{goal.isl_tokens} in, {goal.osl_tokens} out, TTFT <= {goal.ttft_slo_s:g} s, {goal.gpus} GPUs")
    axes.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside right upper")
    figure.savefig(path, dpi=120, metadata={"Software": "kvmesh"})
