"""A page of results for each GPU, made from the JSON of the GPU's reports, and the reports'
plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .plot import chosen, draw, fingerprint, fingerprint_in
from .report import NO_GPU, Report, Row, markdown_table

COMMAND = "python -m cute_attn.bench pages"


def write_pages(directory: Path) -> list[Path]:
    """Write the page of each folder of reports, and draw the plots that are out of date.
    Returns the paths of the pages."""
    pages = []
    for folder in folders(directory):
        for report in read(folder):
            picture = folder / f"{report.stem}.png"
            if not chosen(report):
                picture.unlink(missing_ok=True)
            elif not picture.exists() or fingerprint_in(picture) != fingerprint(report):
                draw(report, picture)
        pages.append(folder.with_suffix(".md"))
        pages[-1].write_text(page(folder))
    return pages


def folders(directory: Path) -> list[Path]:
    """The folders of reports: one for each GPU, and one for benchmarks that run without a GPU."""
    return sorted({path.parent for path in directory.glob("*/*.json")})


def read(folder: Path) -> list[Report]:
    """The reports in a folder, by name."""
    reports = [Report.from_json(path.read_text()) for path in folder.glob("*.json")]
    return sorted(reports, key=lambda report: report.stem)


def page(folder: Path) -> str:
    """The page, in Markdown, of the reports in a folder beside it."""
    reports = read(folder)
    where = "without a GPU" if folder.name == NO_GPU else f"on {reports[0].environment['gpu']}"
    short = short_runs(reports)
    table: list[Row] = [
        {
            "benchmark": f"[{report.stem}](#{report.stem})",
            "measured": report.title,
            "date": str(report.environment.get("date"))[:10],
            "commit": report.environment.get("commit"),
        }
        for report in [*reports, *short]
    ]
    lines = [
        f"<!-- Made by `{COMMAND}` of the files of the files in {folder.name}/: change these. -->",
        "",
        f"# Results {where}",
        "",
        "The last run of each benchmark, each with its command, machine, versions and commit."
        " [Benchmarks](index.md) says how times are taken.",
        "",
        *markdown_table(list(table[0]), table),
        "",
    ]
    sections = []
    for report in reports:
        name = f"{folder.name}/{report.stem}"
        picture = f"{name}.png" if (folder / f"{report.stem}.png").exists() else None
        raw = f"[All numbers as JSON]({name}.json)."
        sections.append(f"{report.to_markdown(report.stem, picture)}\n{raw}\n")
    sections += [report.to_markdown(report.stem) for report in short]
    return "\n".join([*lines, "\n".join(sections)])


def short_runs(reports: Sequence[Report]) -> list[Report]:
    """The parts that are separate runs and whose benchmark has no report in this folder."""
    return [
        part
        for report in reports
        for part in report.parts
        if part.environment and not any(r.stem.startswith(part.benchmark) for r in reports)
    ]
