"""Markdown, and the HTML of the elements that the chat page makes of it."""

from __future__ import annotations

ATTRIBUTE = 'a" onclick="pwned'


def _link(address: str, text: str) -> str:
    return f'<a href="{address}" rel="noopener noreferrer" target="_blank">{text}</a>'


MARKDOWN_CASES: dict[str, str] = {
    "# Title #\ntext": "<h3>Title</h3><p>text</p>",
    "####### seven": "<p>####### seven</p>",
    "a **b *c*** `<d>` ~~e~~ \\*f\\*": (
        "<p>a <strong>b <em>c</em></strong> <code>&lt;d&gt;</code> <del>e</del> *f*</p>"
    ),
    "snake_case_name 2 * 3 * 4 _em_ __strong__": "<p>snake_case_name 2 * 3 * 4 <em>em</em> <strong>strong</strong></p>",
    "`` a`b `` **open": "<p><code>a`b</code> **open</p>",
    "a\nb\n\nc": "<p>a\nb</p><p>c</p>",
    "- a\n- b\n  - c\n    1. d\n- e": (
        '<ul><li>a</li><li>b<ul><li>c<ol start="1"><li>d</li></ol></li></ul></li><li>e</li></ul>'
    ),
    "2. a\n  - b\n3. c": '<ol start="2"><li>a<ul><li>b</li></ul></li><li>c</li></ol>',
    "1. a\n\n2. b": '<ol start="1"><li><p>a</p></li><li><p>b</p></li></ol>',
    "- a\n\n- b\n\nc": "<ul><li><p>a</p></li><li><p>b</p></li></ul><p>c</p>",
    "1. a\n   ```\n   x\n     y\n   ```\n2. b": "",
    "text:\n- a\nand 3.5\n1986. b": "<p>text:</p><ul><li>a\nand 3.5\n1986. b</li></ul>",
    "- [ ] a\n- [x] b": "<ul><li>☐ a</li><li>☑ b</li></ul>",
    "> a\n> > b\n\nc": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>",
    "a\n\n---\n\nb\n***": "<p>a</p><hr><p>b</p><hr>",
    "| a | b |\n|:-:|--:|\n| **1** | x \\| y<br>z |\n| 2 |\nafter": (
        '<div class="table" tabindex="0"><table>'
        '<thead><tr><th class="center">a</th><th class="right">b</th></tr></thead>'
        '<tbody><tr><td class="center"><strong>1</strong></td><td class="right">x | y<br>z</td></tr>'
        '<tr><td class="center">2</td><td class="right"></td></tr></tbody></table></div><p>after</p>'
    ),
    "a | b\nc | d": "<p>a | b\nc | d</p>",
    "[x](https://example.org/a_(b) 'title') (see https://example.org/c.)": (
        f"<p>{_link('https://example.org/a_(b)', 'x')} (see {_link('https://example.org/c', 'https://example.org/c')}.)</p>"
    ),
    "<https://example.org/?a=1&b=2> [mail](mailto:a@example.org)": (
        f"<p>{_link('https://example.org/?a=1&amp;b=2', 'https://example.org/?a=1&amp;b=2')} "
        f"{_link('mailto:a@example.org', 'mail')}</p>"
    ),
    # What could load, run or lead elsewhere is text, or a link that says where it leads.
    "![cat](https://example.org/cat.png)": f"<p>{_link('https://example.org/cat.png', 'image: cat')}</p>",
    "![x](data:image/png;base64,AA) [y](javascript:pwned) [z](/v1/models) [q](JaVaScRiPt:pwned)": (
        "<p>![x](data:image/png;base64,AA) [y](javascript:pwned) [z](/v1/models) [q](JaVaScRiPt:pwned)</p>"
    ),
    "<script>pwned</script><img src=x onerror=pwned>\n\n<svg onload=pwned>": (
        "<p>&lt;script&gt;pwned&lt;/script&gt;&lt;img src=x onerror=pwned&gt;</p><p>&lt;svg onload=pwned&gt;</p>"
    ),
    '[a" onclick="pwned](https://example.org/"onclick=pwned)': (
        f"<p>{_link('https://example.org/%22onclick=pwned', ATTRIBUTE)}</p>"
    ),
    ">" * 50 + " deep\n\n" + "- " * 50 + "deep": "",
}
"""The elements' HTML by the Markdown; empty: it is only drawn the same at once as piece by piece, and unlike HTML."""
