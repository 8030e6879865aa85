"""docs/results.md and docs/reliability.md: their tables and pictures from the results beside them.

Question  Does the document say what was measured?
Holds     Between ``<!-- table:NAME -->`` and ``<!-- /table -->`` stands what results/NAME.json gives and nothing else;
          text outside is left alone. Writing twice changes nothing.
"""

import re
from pathlib import Path

from benchmarks import report
from benchmarks.lab import figures
from benchmarks.results import read

DOCUMENT = Path(__file__).parents[2] / "docs" / "results.md"
RELIABILITY = DOCUMENT.with_name("reliability.md")
_TABLE = re.compile(r"(<!-- table:([\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def tables(file: Path) -> str:
    """A results file as it stands in a document: tables, verdicts and the machine."""
    results = read(file)
    shown = [report.markdown(sheet) for sheet in report.sheets(results)]
    verdicts = report.judged(results)
    if verdicts:
        shown.append(report.markdown(report.verdict_sheet("Targets", ("met", "missed"), verdicts)))
    return "\n".join([*shown, report.facts(results), ""])


def written(text: str, folder: Path) -> str:
    """The document with its tables made anew."""
    return _TABLE.sub(lambda found: found[1] + tables(folder / f"{found[2]}.json") + found[3], text)


def publish(document: Path = DOCUMENT) -> list[Path]:
    """Make the document's tables and the pictures it shows anew; which files were written."""
    folder = document.parent / "results"
    text = document.read_text()
    document.write_text(written(text, folder))
    files = [document]
    for name in dict.fromkeys(found[2] for found in _TABLE.finditer(text)):
        results = read(folder / f"{name}.json")
        if results.benchmark in figures.DRAWN and f"results/{name}.svg" in text:
            files.append(folder / f"{name}.svg")
            figures.draw(results, files[-1])
    return files
