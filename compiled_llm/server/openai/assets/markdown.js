"use strict";

// What a model writes, as elements: paragraphs, headings, lists, code, bold and italic text. Text is only ever set as
// text, links and HTML stay what was written, and nothing is fetched.

const element = (name, text = "", className = "") => {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
};

const INLINE = /(`+)([\s\S]+?)\1(?!`)|\*\*(?=\S)([\s\S]+?)\*\*|(?<![\w*])\*(?=\S)([^*\n]+?)\*(?![\w*])/g;

function appendInline(parent, text) {
  let last = 0;
  for (const found of text.matchAll(INLINE)) {
    parent.append(text.slice(last, found.index));
    const [, , code, bold, italic] = found;
    parent.append(element(code ? "code" : bold ? "strong" : "em", code ?? bold ?? italic));
    last = found.index + found[0].length;
  }
  parent.append(text.slice(last));
  return parent;
}

const FENCE = /^ {0,3}(```+|~~~+)/;
const HEADING = /^(#{1,6}) +(.+)$/;
const ITEM = /^ {0,3}(?:[-*+]|(\d{1,9})[.)]) +(.*)$/;

// Each takes lines from the front of a list, and returns an element.

function codeBlock(lines) {
  const fence = FENCE.exec(lines.shift())[1];
  const inside = [];
  while (lines.length && !lines[0].trimStart().startsWith(fence)) inside.push(lines.shift());
  lines.shift();
  const block = element("pre");
  block.tabIndex = 0; // it may scroll
  block.append(element("code", inside.join("\n")));
  return block;
}

function list(lines) {
  const number = ITEM.exec(lines[0])[1];
  const made = element(number ? "ol" : "ul");
  if (number) made.start = Number(number);
  for (let found; lines.length && (found = ITEM.exec(lines[0])) && Boolean(found[1]) === Boolean(number); ) {
    lines.shift();
    const inside = [found[2]];
    while (lines.length && /^\s+\S/.test(lines[0])) inside.push(lines.shift().trim());
    made.append(appendInline(element("li"), inside.join("\n")));
    if (lines.length > 1 && !lines[0].trim() && ITEM.test(lines[1])) lines.shift();
  }
  return made;
}

const startsBlock = (line) => !line.trim() || FENCE.test(line) || HEADING.test(line) || ITEM.test(line);

function paragraph(lines) {
  const inside = [lines.shift()];
  while (lines.length && !startsBlock(lines[0])) inside.push(lines.shift());
  return appendInline(element("p"), inside.join("\n"));
}

function block(lines) {
  if (FENCE.test(lines[0])) return codeBlock(lines);
  if (ITEM.test(lines[0])) return list(lines);
  const heading = HEADING.exec(lines[0]);
  if (!heading) return paragraph(lines);
  lines.shift();
  return appendInline(element(heading[1].length < 3 ? "h3" : "h4"), heading[2]);
}

function markdown(text) {
  const lines = text.split("\n");
  const blocks = [];
  while (lines.length) {
    if (lines[0].trim()) blocks.push(block(lines));
    else lines.shift();
  }
  return blocks;
}
