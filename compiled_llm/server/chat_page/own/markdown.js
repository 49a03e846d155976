// What a model writes, as elements: markdown-it makes HTML of it, highlight.js and Temml colour code and write
// mathematics, and DOMPurify lets through what is listed here. If anything fails, the text stays as it was written.

import { button, copy, element } from "./elements.js";
import { withMath } from "./math.js";

const COLOURED = 10_000; // characters of a code block; longer ones stay plain
const LONG_LINE = /[^\n]{1000}/; // so do those with such a line, and Markdown: highlight.js may need seconds for them
const RENDERED = 200_000; // and of a block of any kind
const TAGS = "p br hr h1 h2 h3 h4 h5 h6 ul ol li blockquote pre code em strong s a table thead tbody tr th td span";
const LAYOUT =
  "accent columnalign columnspan displaystyle fence form linethickness lspace maxsize minsize movablelimits notation " +
  "rspace scriptlevel separator stretchy symmetric width"; // attributes of mathematics
const LISTED = {
  USE_PROFILES: { mathMl: true },
  ADD_TAGS: TAGS.split(" "),
  ADD_ATTR: ["class", "href", "start"],
  ADD_URI_SAFE_ATTR: ["start", ...LAYOUT.split(" ")], // the pattern below is asked of the values of all others
  FORBID_ATTR: ["style", "id", "name", "title"],
  FORBID_TAGS: ["annotation", "annotation-xml", "maction", "mglyph", "style"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

let known = null; // markdown-it, once it was needed

function markdown() {
  if (known) return known;
  known = withMath(markdownit({ linkify: true, breaks: true, maxNesting: 40, highlight: coloured }));
  known.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
  known.validateLink = (address) => LISTED.ALLOWED_URI_REGEXP.test(address);
  known.renderer.rules.image = (tokens, index) => known.utils.escapeHtml(tokens[index].content); // fetches nothing
  for (const cell of ["th_open", "td_open"]) known.renderer.rules[cell] = aligned;
  DOMPurify.addHook("afterSanitizeAttributes", (node) => {
    if (node.localName === "a") Object.assign(node, { target: "_blank", rel: "noopener noreferrer nofollow" });
  });
  return known;
}

function aligned(tokens, index, options, env, renderer) {
  const alignment = /\b(?:center|right)$/.exec(tokens[index].attrGet("style") ?? "")?.[0];
  tokens[index].attrs = alignment ? [["class", alignment]] : null; // the page's policy allows no style in an element
  return renderer.renderToken(tokens, index, options);
}

function coloured(code, language) {
  const name = hljs.getLanguage(language)?.name;
  if (!name || name === "Markdown" || code.length > COLOURED || LONG_LINE.test(code)) return ""; // it is escaped then
  return hljs.highlight(code, { language, ignoreIllegals: true }).value;
}

function framed(fragment) {
  for (const block of fragment.querySelectorAll("pre")) {
    const language = /\blanguage-(\S+)/.exec(block.firstElementChild?.className)?.[1] ?? "";
    const frame = element("div", "", "code");
    const head = element("div", "", "head");
    const copying = button("Copy", () => copy(block.textContent, copying), "quiet");
    copying.setAttribute("aria-label", "Copy code");
    head.append(element("span", language), copying);
    block.replaceWith(frame);
    block.tabIndex = 0; // it may scroll
    frame.append(head, block);
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = element("div", "", "wide");
    frame.tabIndex = 0;
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

// A text that grows. Blocks that are over are made into elements once, and only the last one again.
export class GrowingMarkdown {
  constructor(into) {
    this.into = into;
    this.settled = 0; // characters whose elements stay
    this.env = { references: {} }; // links that settled text defines
    this.tail = element("div", "", "tail");
    into.append(this.tail);
  }

  draw(text) {
    try {
      if (text.length - this.settled > RENDERED) throw new RangeError("a block is too long");
      const end = this.settled + over(text.slice(this.settled));
      if (end > this.settled) this.tail.before(made(text.slice(this.settled, end), this.env));
      this.settled = end;
      this.tail.replaceChildren(made(text.slice(end), { references: Object.create(this.env.references) }));
      this.tail.classList.remove("plain");
    } catch (error) {
      console.warn("compiled_llm: this is shown as text", error);
      this.tail.textContent = text.slice(this.settled);
      this.tail.classList.add("plain");
    }
  }
}

// How many characters are before the last block whose first line has ended: no further text changes these.
function over(text) {
  const lines = [0];
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) lines.push(at + 1);
  const begins = ({ level, nesting, map }) => level === 0 && nesting >= 0 && map && map[0] < lines.length - 1;
  const blocks = markdown().parse(text, {}).filter(begins);
  return blocks.length > 1 ? lines[blocks.at(-1).map[0]] : 0;
}

const made = (text, env) => framed(DOMPurify.sanitize(markdown().render(text, env), LISTED));
