from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from server_worlds import MakeApi

from skipjoin.routes import PAGES


@pytest.mark.anyio
async def test_pages_need_no_key_and_allow_nothing_foreign(make_api: MakeApi) -> None:
    async with make_api(api_keys=("right",)) as api:
        for path in PAGES:
            found = await api.http.get(path)
            assert found.status_code == 200, path
            policy = found.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "http://" not in found.text.replace("http://www.w3.org/", "")
            assert "https://" not in found.text
            again = await api.http.get(path, headers={"if-none-match": found.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert (await api.http.get("/console/../debug/requests")).status_code == 401
        assert (await api.http.get("/debug/events")).status_code == 401
    async with make_api(console=False) as api:
        assert (await api.http.get("/console")).status_code == 404


# A document that is enough for `h`: an element is its HTML.
_DOCUMENT = """
globalThis.Node = class {
  constructor(tag) { Object.assign(this, { tag, attributes: {}, childNodes: [] }); }
  get lastChild() {
    const parent = this;
    return { remove() { parent.childNodes.pop(); } };
  }
  setAttribute(name, value) { this.attributes[name] = value; }
  addEventListener() {}
  append(...more) { this.childNodes.push(...more); }
  toString() {
    const escaped = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;");
    const attributes = Object.entries(this.attributes).map(([name, value]) => ` ${name}="${escaped(value)}"`).join("");
    const inner = this.childNodes.map((one) => (one instanceof Node ? one : escaped(one))).join("");
    return `<${this.tag}${attributes}>${inner}</${this.tag}>`;
  }
};
globalThis.document = { createElement: (tag) => new Node(tag) };
"""


def _run_node(script: str, given: Any) -> Any:
    """Run a module that sees `MarkdownView` and `given`, and return what it assigns to `result`."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is missing")
    module = Path(str(files("skipjoin").joinpath("console", "markdown.js"))).as_uri()
    head = (
        f"const {{ MarkdownView, blocks }} = await import({json.dumps(module)});\nconst given = {json.dumps(given)};\n"
    )
    tail = "\nconsole.log(JSON.stringify(result));"
    done = subprocess.run(
        [node, "--input-type=module"],
        check=False,
        input=_DOCUMENT + head + script + tail,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_markdown_of_answers_becomes_elements() -> None:
    cases = {
        "# Plan": "<h2>Plan</h2>",
        "a **b *c*** `d*e`\nf": "<p>a <strong>b <em>c</em></strong> <code>d*e</code>\nf</p>",
        "snake_case 2 * 3 \\*x\\*": "<p>snake_case 2 * 3 *x*</p>",
        "- a\n  - b\n- c": "<ul><li><p>a</p><ul><li><p>b</p></li></ul></li><li><p>c</p></li></ul>",
        "3. a\n4. b": '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>',
        "> q": "<blockquote><p>q</p></blockquote>",
        "see https://a.example/b.": '<a href="https://a.example/b" target="_blank" rel="noopener noreferrer">',
        "[t](http://a.example)": '<a href="http://a.example/" target="_blank" rel="noopener noreferrer">t</a>',
        "|a|b|\n|-|-|\n|1|`x|y`|": "<td>1</td><td><code>x|y</code></td>",
        "```py\nx = '<b>'": '<pre tabindex="0"><code>x = \'&lt;b></code></pre>'.replace("'&lt;b>", "'&lt;b>'"),
    }
    found = _run_node("const result = given.map((text) => String(new MarkdownView().update(text)));", list(cases))
    for (text, expected), html in zip(cases.items(), found, strict=True):
        assert expected in html, (text, html)


def test_hostile_markdown_stays_text_and_takes_linear_time() -> None:
    inert = [
        "<script>alert(1)</script>",
        "[x](javascript:alert(1))",
        "[x](data:text/html,1)",
        "![x](https://evil.example/i.png)",
        "<img src=x onerror=alert(1)>",
        '[x](https://a.example/"onclick=alert(1))',
    ]
    found = _run_node("const result = given.map((text) => String(new MarkdownView().update(text)));", inert)
    for text, html in zip(inert, found, strict=True):
        assert not any(bad in html for bad in ("<script", "<img", 'javascript:alert(1)"', 'href="data', " onclick")), (
            text,
            html,
        )
    heavy = ["*" * 50_000, "[" * 50_000, "`a" * 25_000, "_a " * 20_000, "**a " * 20_000, "> " * 20_000, "![](" * 15_000]
    assert _run_node("given.forEach((text) => blocks(text));\nconst result = true;", heavy)


def test_growing_answer_keeps_the_elements_of_finished_blocks() -> None:
    text = "# A\n\nfirst\n\n```\ncode\n```\n\nlast"
    script = """
    const view = new MarkdownView();
    let kept = 0;
    for (let end = 1; end <= given.length; end += 1) {
      const before = [...view.element.childNodes];
      view.update(given.slice(0, end));
      kept += before.slice(0, -1).every((one, at) => one === view.element.childNodes[at]);
    }
    const result = [kept === given.length, String(view.element) === String(new MarkdownView().update(given))];
    """
    assert _run_node(script, text) == [True, True]
