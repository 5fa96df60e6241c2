"""The results as tables: for a terminal (rich) and for `docs/benchmarks.md` (Markdown), from the same rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from stats import Middle, middle

GIB_IN_MIB = 1024
MAX_RECOVERY_FACTOR, MAX_RECOVERY_EXTRA_S = 2.0, 1.0
MAX_START_S, MAX_MEMORY_GIB, MIN_SPEEDUP, MAX_TTFT_RATIO, MIN_HITS = 15.0, 2.5, 2.0, 0.25, 15


@dataclass(frozen=True)
class Section:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def spread(values: Iterable[float], scale: float = 1.0, digits: int = 0) -> str:
    """`median (lowest to highest)`; just the value where there is but one."""
    runs = [value * scale for value in values]
    m: Middle = middle(runs)
    text = f"{m.median:.{digits}f}"
    return text if len(runs) == 1 else f"{text} ({m.low:.{digits}f} to {m.high:.{digits}f})"


def targets(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was to be reached, what was, and whether that is enough; of the parts that were run."""
    found = load_targets(results) if "loads" in results else []
    return found + (recovery_targets(results["recovery"]) if "recovery" in results else [])


def recovery_targets(recovery: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The limit follows from the time that the same tokens take as fresh prompts, measured in the same run."""
    return [
        _target(
            f"pause of streams whose decode worker is killed, {p}, s",
            recovery[f"recovery_{p}_s"],
            MAX_RECOVERY_FACTOR * recovery[f"reprefill_{p}_s"] + MAX_RECOVERY_EXTRA_S,
        )
        for p in ("p50", "p99")
    ]


def load_targets(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = [
        _target("start to first token, s", middle(results["start_s"]).median, MAX_START_S),
        _target(
            "peak memory of kvferry's processes, GiB",
            max(m["total_mib"] for m in results["memory"]) / GIB_IN_MIB,
            MAX_MEMORY_GIB,
        ),
    ]
    for kind, peer in results["transformers"].items():
        own = results["loads"][f"16 at once, {kind}"]
        ratios = [a["tokens_per_s"] / b for a, b in zip(own, peer, strict=True)]
        found.append(_target(f"tokens/s over transformers', 16 at once, {kind}", middle(ratios).median, MIN_SPEEDUP, 1))
    long = [pair["second_s"] / pair["first_s"] for pair in results["long_prefix"]]
    found.append(_target("TTFT with 960 of 1024 tokens cached, over without", middle(long).median, MAX_TTFT_RATIO))
    hits = min(run["num_shared_hits"] for run in results["loads"]["16 at once, shared"])
    found.append(_target("of 16 at once with one system prompt: hits of 176 tokens (worst run)", hits, MIN_HITS, 1))
    return found


def _target(what: str, reached: float, limit: float, sign: int = -1) -> dict[str, Any]:
    """`sign`: 1 where more is better."""
    return {
        "what": what,
        "target": f"{'at least' if sign > 0 else 'at most'} {limit:.3g}",
        "reached": reached,
        "met": (reached - limit) * sign >= 0,
    }


def sections(results: Mapping[str, Any]) -> list[Section]:
    """Of the parts that were run."""
    found = [targets_section(results["targets"])]
    if "loads" in results:
        found += [make(results) for make in (_speed, _traffic, _beside, _long_prefix, _memory, _correctness)]
    return [*found, recovery_section(results["recovery"])] if "recovery" in results else found


def targets_section(rows: Sequence[Mapping[str, Any]]) -> Section:
    cells = [(t["what"], t["target"], f"{t['reached']:.2f}", "yes" if t["met"] else "no") for t in rows]
    return Section("Targets", ("what", "target", "reached", "met"), cells)


def recovery_section(recovery: Mapping[str, Any]) -> Section:
    r = recovery
    pauses = [f"{r[f'recovery_{p}_s']:.2f}" for p in ("p50", "p99")]
    fresh = [f"{r[f'reprefill_{p}_s']:.2f}" for p in ("p50", "p99")]
    rows = [
        ("SIGKILL to the next token of a stream: p50, p99, s", ", ".join(pauses)),
        ("the same 500 tokens of each as fresh prompts, to the first token: p50, p99, s", ", ".join(fresh)),
        ("SIGKILL to the server's knowing of the death, s", f"{r['noticed_s']:.2f}"),
        ("SIGKILL to the surviving group's first report of the work, s", f"{r['submitted_s']:.2f}"),
        ("SIGKILL to the next token of the first and of the last stream, s", f"{r['first_s']:.2f}, {r['last_s']:.2f}"),
        (
            "tokens that the surviving group had to read, and of these in its cache",
            f"{r['prompt_tokens']:.0f}, {r['cached_tokens']:.0f}",
        ),
        ("sequences that decoded on the killed group", f"{r['num_decoding']:.0f}"),
        ("findings of Admin.Audit after each round", str(len(r["audit"]))),
    ]
    note = f"8 streams of 500 tokens, half of them prompt, one prefill and one decode group; {len(r['rounds'])} kills."
    return Section("Recovery from the death of a decode worker", ("what", "result"), rows, note)


def _speed(results: Mapping[str, Any]) -> Section:
    rows = []
    for name, runs in results["loads"].items():
        cells = [spread(r["tokens_per_s"] for r in runs)]
        cells += [
            spread((r[key] for r in runs), 1000) for key in ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")
        ]
        rows.append((name, *cells))
    columns = ("load", "output tokens/s", "TTFT p50, ms", "TTFT p99, ms", "ITL p50, ms", "ITL p99, ms")
    note = "256-token prompts, the first 192 tokens shared or none, 64 new tokens, greedy, streamed over gRPC."
    return Section("Speed under load", columns, rows, note)


def _traffic(results: Mapping[str, Any]) -> Section:
    rows = [
        (
            name,
            spread((r["hit_rate"] for r in runs), 100),
            spread(r["num_shared_hits"] for r in runs),
            f"{runs[0]['num_requests']:.0f}",
            spread(r["num_ferried_requests"] for r in runs),
            spread((r["ferried_bytes"] for r in runs), 1e-6, 1),
            spread((r["server_cpu_s"] for r in runs), 1, 1),
            spread((r["client_cpu_s"] for r in runs), 1, 1),
            spread((r["other_cores"] for r in runs), 1, 1),
        )
        for name, runs in results["loads"].items()
    ]
    columns = (
        *("load", "prefix hit rate, %", "hit 176+ tokens", "requests", "ferried requests", "ferried MB"),
        *("server CPU, s", "client CPU, s", "cores others used"),
    )
    return Section("Reuse, transfers and CPU time", columns, rows)


def _beside(results: Mapping[str, Any]) -> Section:
    rows = [
        (
            f"16 at once, {kind}",
            spread(r["tokens_per_s"] for r in results["loads"][f"16 at once, {kind}"]),
            spread(peer),
            spread(
                [a["tokens_per_s"] / b for a, b in zip(results["loads"][f"16 at once, {kind}"], peer, strict=True)],
                digits=2,
            ),
        )
        for kind, peer in results["transformers"].items()
    ]
    columns = ("load", "kvferry, tokens/s", "transformers, tokens/s", "ratio")
    note = "transformers: `generate` on one batch of the same prompts, bf16, in turn with kvferry's loads."
    return Section("Beside transformers", columns, rows, note)


def _long_prefix(results: Mapping[str, Any]) -> Section:
    pairs = results["long_prefix"]
    row = (
        spread((p["first_s"] for p in pairs), 1000),
        spread((p["second_s"] for p in pairs), 1000),
        spread((p["second_s"] / p["first_s"] for p in pairs), digits=3),
    )
    columns = ("TTFT of a first prompt, ms", "TTFT of a second one, ms", "ratio")
    return Section("1024-token prompts that share 960 tokens", columns, [row])


def _memory(results: Mapping[str, Any]) -> Section:
    runs = results["memory"]
    rows = [(name, spread(run["own_mib"][name] for run in runs)) for name in runs[0]["own_mib"]]
    rows.append(("all of kvferry", spread(run["total_mib"] for run in runs)))
    rows += [(f"Ray's {name}", f"{peak:.0f}") for name, peak in runs[-1]["ray_mib"]]
    note = "VmHWM. Pages that processes share count in each of them."
    return Section("Peak resident memory", ("process", "MiB"), rows, note)


def _correctness(results: Mapping[str, Any]) -> Section:
    c = results["correctness"]
    rows = [
        (
            f"first {c['num_tokens']} greedy tokens equal transformers' (bf16)",
            f"{c['equal_transformers']} of {c['num_prompts']}",
        ),
        ("tokens up to the first difference from transformers", f"{100 * c['token_share']:.0f} %"),
        ("disaggregated answers equal a mixed group's", f"{c['equal_mixed']} of {c['num_prompts']}"),
        ("of these answers, ferried", f"{c['num_ferried']} of {c['num_prompts']}"),
        ("findings of Admin.Audit after the loads", str(len(results["audit"]))),
    ]
    return Section("Correctness", ("check", "result"), rows)


def environment_lines(environment: Mapping[str, Any]) -> list[str]:
    e = environment
    versions = ", ".join(f"{name} {version}" for name, version in e["versions"].items())
    peer = f"transformers with {e['peer_threads']} threads, OpenMP wait policy {e.get('peer_waiting')} (the faster one "
    peer = f"{peer}here); " if "peer_waiting" in e else ""
    return [
        f"{e['cpu']}, {e['cores']} cores, {e['memory_gib']:.0f} GiB; Python {e['python']}; {versions}.",
        f"`kvferry serve {e['model']} {' '.join(e['serve_options'])}`; {peer}{e['runs']} run(s), load average "
        f"{e['load_average'][0]:.1f} before and {e['load_average'][1]:.1f} after.",
    ]


def show(results: Mapping[str, Any], console: Console) -> None:
    for section in sections(results):
        print_section(section, console)
    for line in environment_lines(results["environment"]):
        console.print(line, highlight=False)


def print_section(section: Section, console: Console) -> None:
    table = Table(title=section.title, title_justify="left", caption=section.note or None, caption_justify="left")
    for i, column in enumerate(section.columns):
        table.add_column(column, justify="right" if i else "left", overflow="fold")
    for row in section.rows:
        table.add_row(*row)
    console.print(table)


def markdown(results: Mapping[str, Any]) -> str:
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench` (`examples/bench/bench.py --write-docs`); medians, with the lowest and highest run in",
        "brackets. Ratios carry over to other machines, absolute figures do not: run it on yours.",
        "",
        *environment_lines(results["environment"]),
    ]
    return "\n".join([*lines, *(f"\n{section_markdown(section)}" for section in sections(results))]) + "\n"


def section_markdown(section: Section) -> str:
    lines = [f"## {section.title}", ""]
    lines += [section.note, ""] if section.note else []
    lines.append("| " + " | ".join(section.columns) + " |")
    lines.append("| --- " + "| ---: " * (len(section.columns) - 1) + "|")
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in section.rows)])


def with_sections(text: str, sections: Sequence[Section]) -> str:
    """Markdown in which these sections stand in place of those with the same titles, or at the end."""
    for section in sections:
        parts = text.split("\n## ")
        written = section_markdown(section).removeprefix("## ") + "\n"
        places = [i for i, part in enumerate(parts) if i and part.split("\n", 1)[0] == section.title]
        if places:
            parts[places[0]] = written
        else:
            parts.append(written)
        text = "\n## ".join(parts)
    return text
