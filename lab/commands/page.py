"""The report of `crossdock tune` as one HTML page: its own SVG and CSS, nothing from a network."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from lab.commands import show

WIDTH, HEIGHT = 480, 260
LEFT, RIGHT, TOP, BOTTOM = 42, 10, 10, 34
Point = tuple[float, float]


def rendered(report: Mapping[str, Any]) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8"))
    best = report["recommendation"]["prefill"], report["recommendation"]["decode"]
    shown = [
        {**square, "words": show.square_words(square, report), "chosen": (square["prefill"], square["decode"]) == best}
        for square in show.squares(report)
    ]
    return template.render(
        report=report,
        probability=show.probability_of(report),
        headline=show.headline(report),
        busy_note=show.BUSY_NOTE,
        ranked=report["ranked"][: show.ROWS_MAX],
        apply_note=show.apply_note(report),
        how=show.how(report),
        number=show.number,
        goodput=Markup(goodput_chart(report)),
        arrivals=Markup(arrivals_chart(report["traffic"]["per_minute"])),
        peak=max(report["traffic"]["per_minute"], default=0.0),
        rows=show.rows_of(shown),
        across=sorted({square["decode"] for square in shown}),
        map_title=show.map_title(report),
        load_words=show.load_words,
        bound_words=show.bound_words,
        shows_bounds=show.shows_bounds(report["ranked"]),
        headroom_words=show.headroom_words,
    )


def goodput_chart(report: Mapping[str, Any]) -> str:
    rows = show.families(report)
    offered, best = report["traffic"]["requests_per_s"], report["recommendation"]["workers"]
    most = max([offered, *(one["goodput_high"] for row in rows for one in row[1:] if one)]) * 1.05
    last = max(rows[-1][0], 2)

    def at(total: float, value: float) -> Point:
        x = LEFT + (total - 1) / (last - 1) * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - value / most * (HEIGHT - TOP - BOTTOM)

    parts = [_axes(most, [(total, at(total, 0)[0]) for total, *_ in rows], "workers")]
    y = at(1, offered)[1]
    parts.append(
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--dim)" stroke-dasharray="4 4"/>'
    )
    apart = [(total, one) for total, one, _ in rows if one is not None]
    mixed = [(total, one) for total, _, one in rows if one is not None]
    for having, colour in ((mixed, "var(--mixed)"), (apart, "var(--apart)")):
        outline = [at(n, one["goodput_high"]) for n, one in having]
        outline += [at(n, one["goodput_low"]) for n, one in reversed(having)]
        parts.append(f'<polygon points="{_points(outline)}" fill="{colour}" opacity=".16"/>')
        line = [at(n, one["goodput_requests_per_s"]) for n, one in having]
        parts.append(f'<polyline points="{_points(line)}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        for (n, one), (x, y) in zip(having, line, strict=True):
            ring = ' stroke="var(--ink)" stroke-width="3"' if one["workers"] == best else ""
            radius = 7 if ring else 4
            title = f"<title>{_told(n, one)}</title>"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"{ring}>{title}</circle>')
    return _svg(parts, "Goodput by number of workers")


def _told(total: int, one: Mapping[str, Any]) -> str:
    return f"{total} workers: {one['workers']}, {one['goodput_requests_per_s']:.2f}/s"


def arrivals_chart(per_minute: Sequence[float]) -> str:
    most = max(per_minute, default=0.0) * 1.05 or 1.0
    count = max(len(per_minute) - 1, 1)
    points = [
        (LEFT + place / count * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - value / most * (HEIGHT - TOP - BOTTOM))
        for place, value in enumerate(per_minute)
    ]
    base = HEIGHT - BOTTOM
    area = [(points[0][0], base), *points, (points[-1][0], base)] if points else []
    parts = [_axes(most, [], "time")]
    parts.append(f'<polygon points="{_points(area)}" fill="var(--apart)" opacity=".2"/>')
    parts.append(f'<polyline points="{_points(points)}" fill="none" stroke="var(--apart)" stroke-width="1.5"/>')
    return _svg(parts, "Requests per second over time")


def _axes(most: float, ticks: Sequence[tuple[int, float]], name: str) -> str:
    parts = []
    for place in range(5):
        value = most * place / 4
        y = HEIGHT - BOTTOM - place / 4 * (HEIGHT - TOP - BOTTOM)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.{1 if most < 20 else 0}f}</text>')
    every = max(1, len(ticks) // 12)
    for label, x in ticks[::every]:
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end">{name}</text>')
    return "".join(parts)


def _points(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _svg(parts: Sequence[str], label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
