"""The tables of `dyncp bench attention`."""

from collections.abc import Iterator, Mapping
from typing import Any

DIRECTIONS = ("forward", "backward")


def draw_virtual(found: Mapping[str, Any]) -> Iterator[str]:
    """Kernel and call milliseconds over ranks, how they compare with one rank and with what was
    predicted, then the step that the topology makes of them."""
    yield from _alone(found["alone"])
    yield (
        f"{'':<22}{'':>9}{'kernels ms':^18}{'other kernels ms':^18}{'call ms':^18}{'host ms':>9}"
        f"{'host / call':^18}{'kernels × alone':^18}{'call × alone':^18}"
        f"{'predicted − measured: kernels, call':^44}"
    )
    yield (
        f"{'':<22}{'':>9}" + f"{'worst':>9}{'mean':>9}" * 3 + f"{'worst':>9}"
        + f"{'worst':>9}{'mean':>9}" * 3 + f"{'worst':>11}{'mean':>11}" * 2
    )  # fmt: skip
    for name, method in found["methods"].items():
        for direction in DIRECTIONS:
            if direction in method["summary"]:
                label = name if direction == DIRECTIONS[0] else ""
                yield f"{label:<22}{direction:>9}" + _summary(method["summary"][direction])
    yield ""
    yield from _steps(found["methods"])


def _alone(alone: Mapping[str, Any]) -> Iterator[str]:
    if alone["reason"]:
        yield f"the whole batch on one rank could not be measured: {alone['reason']}"
        return
    for direction in DIRECTIONS:
        if direction in alone:
            times = alone[direction]
            yield (
                f"the whole batch on one rank, {direction}: kernels "
                f"{1e3 * times['kernel_seconds']:.2f} ms, call {1e3 * times['call_seconds']:.2f} ms"
            )
    yield ""


def _summary(summary: Mapping[str, Any]) -> str:
    columns = ("kernel_seconds", "other_seconds", "call_seconds")
    text = "".join(_worst_and_mean(summary[column], 1e3, 2) for column in columns)
    text += f"{1e3 * summary['host_seconds']['worst']:>9.2f}"
    for column in ("host_over_call", "over_alone", "call_over_alone"):
        text += _worst_and_mean(summary[column], 1, 3)
    for column in ("prediction_error", "call_prediction_error"):
        error = summary[column]
        text += f"{100 * error['worst']:>+9.1f} %{100 * error['mean']:>9.1f} %"
    return text


def _worst_and_mean(found: Mapping[str, float] | None, factor: float, digits: int) -> str:
    if found is None:
        return f"{'–':>9}" * 2
    return "".join(f"{factor * found[which]:>9.{digits}f}" for which in ("worst", "mean"))


def _steps(methods: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{'one attention layer, ms':<31}{'predicted':^27}{'with measured kernels':^27}"
        f"{'× first':>9}"
    )
    yield f"{'':<31}" + f"{'forward':>9}{'backward':>9}{'both':>9}" * 2
    first = next(iter(methods.values()), None)
    for name, method in methods.items():
        text = f"{name + ' (' + method['solver'] + ')':<31}"
        for times in (method["predicted"], method["with_measured_kernels"]):
            for column in ("forward_seconds", "backward_seconds", "attention_seconds"):
                text += f"{1e3 * times[column]:>9.2f}"
        assert first is not None
        base = first["with_measured_kernels"]["attention_seconds"]
        yield text + f"{method['with_measured_kernels']['attention_seconds'] / base:>9.3f}"


def draw_ranks(found: Mapping[str, Any]) -> Iterator[str]:
    """Measured beside predicted, the slowest rank's."""
    yield f"{'one attention layer, ms':<31}{'measured':>10}{'predicted':>11}{'difference':>12}"
    for name, method in found["methods"].items():
        for direction, measured in method["measured"].items():
            label = f"{name} ({method['solver']})" if direction == DIRECTIONS[0] else ""
            seconds, predicted = measured["seconds"], method["predicted"][direction]
            yield (
                f"{label:<22}{direction:>9}{1e3 * seconds:>10.2f}{1e3 * predicted:>11.2f}"
                f"{100 * (predicted / seconds - 1):>+10.1f} %"
            )
