// Mathematics in Markdown: $…$ and \(…\) in a line, $$…$$ and \[…\] by itself. Temml writes it as MathML.

const INLINE = [
  [/\$\$([^$]{1,4000}?)\$\$/y, "display"],
  [/\$(?![\s$])((?:\\.|[^\\$]){1,4000}?)(?<!\s)\$(?!\d)/y, ""],
  [/\\\(([^]{1,4000}?)\\\)/y, ""],
  [/\\\[([^]{1,4000}?)\\\]/y, "display"],
];
const ENDS = { $$: "$$", "\\[": "\\]" };
const MOST_LINES = 60; // of a block; one that does not end looks no further

function inline(state, silent) {
  const begins = state.src[state.pos];
  if (begins !== "$" && begins !== "\\") return false;
  for (const [pattern, info] of INLINE) {
    pattern.lastIndex = state.pos;
    const found = pattern.exec(state.src);
    if (!found) continue;
    if (!silent) Object.assign(state.push("math", "", 0), { content: found[1], info });
    state.pos += found[0].length;
    return true;
  }
  return false;
}

const lineOf = (state, line) => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]).trimEnd();

// One whose end has not come yet takes the rest, so that no list or rule is seen in it.
function block(state, first, last, silent) {
  const end = ENDS[lineOf(state, first).slice(0, 2)];
  if (!end) return false;
  let line = first;
  const ends = () => lineOf(state, line).endsWith(end) && (line > first || lineOf(state, line).length > 4);
  while (line < last && line - first < MOST_LINES && !ends()) line += 1;
  const open = line === last;
  if (line - first === MOST_LINES || (open && lineOf(state, first).indexOf(end, 2) > 0)) return false;
  if (silent) return true;
  const next = open ? last : line + 1;
  const text = state.getLines(first, next, state.blkIndent, false).trim();
  const content = open ? text : text.slice(2, -2);
  Object.assign(state.push("math", "", 0), { block: true, content, info: open ? "open" : "display", map: [first, next] });
  state.line = next;
  return true;
}

// Without trust, no command fetches or links anything; what Temml does not know stays as it was written. The page's
// policy allows no style in an element, so that its CSS has what mathematics needs.
function written(tokens, index) {
  const { content, info } = tokens[index];
  const options = { displayMode: info === "display", throwOnError: false, trust: false, maxExpand: 500 };
  return temml.renderToString(content, options).replace(/ style="[^"]*"/g, "");
}

export function withMath(markdown) {
  const { inline: { ruler }, block: { ruler: blocks }, renderer, utils } = markdown;
  ruler.before("escape", "math", inline);
  blocks.before("fence", "math", block, { alt: ["paragraph", "blockquote", "list"] });
  renderer.rules.math = (tokens, index) =>
    tokens[index].info === "open" ? `<pre>${utils.escapeHtml(tokens[index].content)}</pre>` : written(tokens, index);
  return markdown;
}
