"""A preview of data as one HTML file that needs no network."""

import html

from te_models.errors import for_terminal
from te_models.inspect.data_preview import CUT, LEARNED, READ, Preview, PreviewRecord

_STYLE = """\
:root { color-scheme: light dark; --learned: #c9efd0; --cut: #f6cfcf; --soft: #667; --line: #ccd; --bar: #4a8f5c }
@media (prefers-color-scheme: dark) { :root { --learned: #1d5130; --cut: #6b2727; --soft: #9aa; --line: #445 } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1rem; margin: 1.6rem 0 .4rem; overflow-wrap: anywhere }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); border-radius: 6px;
  padding: .7rem; margin: 0; font: 13px/1.55 ui-monospace, monospace }
.learned { background: var(--learned); border-radius: 3px } .read { color: var(--soft) }
.cut { background: var(--cut); text-decoration: line-through } .out { color: #b33 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } td, th { text-align: right;
  padding: .1rem .8rem .1rem 0 }
.bar { text-align: left } .bar i { display: inline-block; height: .8em; background: var(--bar); vertical-align: middle }
"""


def preview_html(preview: Preview) -> str:
    """Return a page with the lines, the records with the learned parts marked, and the lengths."""
    lines = "\n".join(f"<li>{_text(line)}</li>" for line in preview.lines)
    records = "\n".join(_record(record) for record in preview.records)
    names = "".join(f"<th>{_text(name)}</th>" for name in preview.quantiles)
    values = "".join(f"<td>{value:,}</td>" for value in preview.quantiles.values())
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>te-models data preview</title><style>{_STYLE}</style></head><body>
<h1>What a run would learn</h1>
<ul>{lines}</ul>
<p><span class="learned">learned</span> &nbsp; <span class="read">read only</span> &nbsp;
<span class="cut">cut</span></p>
{records}
<h2>Tokens per record</h2>
<table><tr>{names}</tr><tr>{values}</tr></table>
<h2>How many have so many tokens (--seq-len {preview.seq_len:,})</h2>
<table>{_bars(preview)}</table>
</body></html>
"""


def _record(record: PreviewRecord) -> str:
    kinds = {LEARNED: "learned", READ: "read", CUT: "cut"}
    parts = "".join(
        f'<span class="{kinds[part.kind]}">{_text(part.text)}</span>' for part in record.parts
    )
    name = ' class="out"' if record.left_out else ""
    return f"<h2{name}>{_text(record.title())}</h2>\n<pre>{parts}</pre>"


def _bars(preview: Preview) -> str:
    most = max(preview.lengths.values(), default=1) or 1
    rows = []
    least = 0
    for limit, count in preview.lengths.items():
        longer = f" longer than {preview.bound}" if count and least >= preview.longest else ""
        width = 20 * count / most
        rows.append(
            f"<tr><td>{least + 1:,} to {limit:,}</td><td>{count:,}</td>"
            f'<td class="bar"><i style="width:{width:.2f}rem"></i>{longer}</td></tr>'
        )
        least = limit
    return "\n".join(rows)


def _text(text: str) -> str:
    """Return a text for HTML, without characters that change the direction of the text around them."""
    return html.escape(for_terminal(text))
