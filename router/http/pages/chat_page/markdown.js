"use strict";
// Draws Markdown as elements. What a model wrote is not trusted: it becomes text nodes and the elements that are made
// here, never HTML, and nothing that it names is loaded. All scans are bounded, so no text takes quadratic time.

const MOST_NESTED = 8;

// Every text that is shown goes in as text, so nothing of it can be markup.
function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// --- inline: code, emphasis, links ---

const URL_CHARS = "(?:[^\\s()<>]|\\([^\\s()<>]{0,200}\\)){1,2000}";
const INLINE = new RegExp([
  "\\\\([!-/:-@[-`{-~])",
  "(?<!`)(`{1,8})(?!`)([^]{1,2000}?)(?<!`)\\2(?!`)",
  `(!?)\\[([^\\[\\]\\n]{0,500})\\]\\(\\s{0,9}(${URL_CHARS})(?:\\s{1,9}["'][^"'\\n]{0,300}["'])?\\s{0,9}\\)`,
  "<((?:https?://|mailto:)[^\\s<>]{1,2000})>",
  "(?<![\\w/])(https?://[^\\s<>\"`*]{1,2000})",
  "<br ?/?>()",
  "\\*\\*(?=\\S)([^]{0,500}?\\S)\\*\\*(?!\\*)|(?<!\\w)__(?=\\S)([^]{0,500}?\\S)__(?!\\w)",
  "\\*(?=[^\\s*])([^]{0,500}?[^\\s*])\\*(?!\\*)|(?<!\\w)_(?=[^\\s_])([^]{0,500}?[^\\s_])_(?!\\w)",
  "~~(?=\\S)([^]{0,500}?\\S)~~",
].join("|"), "g");

function inline(text, into, depth = 0) {
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, escaped, , code, isImage, label, target, angled, bare, isBreak, bold, bold2, italic, italic2, struck] = found;
    into.append(text.slice(end, found.index));
    end = found.index + whole.length;
    if (escaped !== undefined) into.append(escaped);
    else if (code !== undefined) into.append(element("code", "", code.replace(/\n/g, " ").replace(/^ ([^]+) $/, "$1")));
    else if (target !== undefined) into.append(link(target, isImage ? `image: ${label || target}` : label || target, whole, depth));
    else if (angled !== undefined) into.append(link(angled, angled, whole, MOST_NESTED));
    else if (bare !== undefined) {
      const address = withoutPunctuation(bare);
      into.append(link(address, address, bare, MOST_NESTED), bare.slice(address.length));
    } else if (isBreak !== undefined) into.append(element("br"));
    else if (bold !== undefined || bold2 !== undefined) into.append(emphasis("strong", bold ?? bold2, depth));
    else if (italic !== undefined || italic2 !== undefined) into.append(emphasis("em", italic ?? italic2, depth));
    else into.append(emphasis("del", struck, depth));
  }
  into.append(text.slice(end));
  return into;
}
function emphasis(tag, text, depth) {
  return depth < MOST_NESTED ? inline(text, element(tag), depth + 1) : element(tag, "", text);
}
// A link that leaves the page alone in a tab of its own; `otherwise` as text where the address is of another kind.
function link(target, label, otherwise, depth) {
  let url = null;
  try {
    url = new URL(target);
  } catch {
    return document.createTextNode(otherwise);
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return document.createTextNode(otherwise);
  const made = element("a");
  made.href = url.href;
  made.rel = "noopener noreferrer";
  made.target = "_blank";
  if (depth >= MOST_NESTED || /https?:/.test(label)) made.textContent = label;
  else inline(label, made, MOST_NESTED);
  return made;
}
// An address in a sentence does not end with the sentence's own punctuation.
function withoutPunctuation(address) {
  let end = address.length;
  while (end && (".,;:!?'_~]".includes(address[end - 1])
    || (address[end - 1] === ")" && address.slice(0, end).split("(").length < address.slice(0, end).split(")").length))) end -= 1;
  return address.slice(0, end);
}

// --- blocks ---

const FENCE_MARK = /^ *(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})(?= |$)/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const indentOf = line => line.length - line.trimStart().length;
// The mark of a line that begins or ends code, and the language behind it; null for another line.
function fenceOf(line) {
  const found = FENCE_MARK.exec(line), name = found && line.slice(found[0].length);
  return found && !name.includes("`") ? {mark: found[1], name: name.trim()} : null;
}

// The blocks that begin at each line: `at` is the index of a block's first line.
function blocksOf(lines, depth = 0) {
  const found = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, next] = blockAt(lines, at, depth);
    found.push({...block, at});
    at = next;
  }
  return found;
}
function blockAt(lines, at, depth) {
  const line = lines[at];
  if (fenceOf(line)) return fenceAt(lines, at);
  if (HEADING.test(line)) return [{kind: "heading", level: HEADING.exec(line)[1].length, text: headingText(line)}, at + 1];
  if (RULE.test(line)) return [{kind: "rule"}, at + 1];
  if (depth < MOST_NESTED && QUOTE.test(line)) return quoteAt(lines, at, depth);
  if (depth < MOST_NESTED && ITEM.test(line)) return listAt(lines, at, depth);
  if (isTable(lines, at)) return tableAt(lines, at);
  let next = at + 1;
  while (next < lines.length && lines[next].trim() && !interrupts(lines, next, depth)) next += 1;
  return [{kind: "paragraph", text: lines.slice(at, next).join("\n")}, next];
}
// Whether a line begins a block of its own although a paragraph stands right before it.
function interrupts(lines, at, depth) {
  const line = lines[at], item = ITEM.exec(line);
  if (fenceOf(line) || HEADING.test(line) || RULE.test(line) || isTable(lines, at)) return true;
  if (depth >= MOST_NESTED) return false;
  return QUOTE.test(line) || Boolean(item && item[3] && (/\D/.test(item[2][0]) || parseInt(item[2], 10) === 1));
}
function headingText(line) {
  const text = line.trim().replace(/^#+/, "").trim();
  let end = text.length;
  while (end && text[end - 1] === "#") end -= 1;
  return end === 0 || text[end - 1] === " " ? text.slice(0, end).trim() : text;
}
function fenceAt(lines, at) {
  const {mark, name} = fenceOf(lines[at]), indent = indentOf(lines[at]), code = [];
  let next = at + 1;
  for (; next < lines.length; next += 1) {
    const end = fenceOf(lines[next]);
    if (end && end.mark.startsWith(mark) && !end.name) break;
    code.push(lines[next].slice(Math.min(indent, indentOf(lines[next]))));
  }
  return [{kind: "fence", name: name.split(/\s/)[0], text: code.join("\n")}, Math.min(next + 1, lines.length)];
}
function quoteAt(lines, at, depth) {
  let next = at;
  while (next < lines.length && QUOTE.test(lines[next])) next += 1;
  const inner = lines.slice(at, next).map(line => line.replace(QUOTE, ""));
  return [{kind: "quote", blocks: blocksOf(inner, depth + 1)}, next];
}
// An item has the lines behind it that are indented by two spaces or more: models seldom count as CommonMark does.
function listAt(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const isSame = line => {
    const item = ITEM.exec(line);
    return item && item[1].length < indent.length + 2 && item[2].slice(-1) === mark.slice(-1) && !RULE.test(line);
  };
  const items = [];
  let next = at, isLoose = false;
  while (next < lines.length) {
    if (!isSame(lines[next])) break;
    const [head] = ITEM.exec(lines[next]);
    const inner = [lines[next].slice(head.length)];
    let isBlank = false;
    for (next += 1; next < lines.length; next += 1) {
      const line = lines[next], lineIndent = indentOf(line);
      if (!line.trim()) isBlank = true;
      else if (lineIndent >= indent.length + 2) {
        if (isBlank) inner.push("");
        inner.push(line.slice(Math.min(lineIndent, head.trimEnd().length + 1)));
        isBlank = false;
      } else if (isBlank || isSame(line) || interrupts(lines, next, depth)) break;
      else inner.push(line);
    }
    if (isBlank && next < lines.length && isSame(lines[next])) isLoose = true;
    items.push(blocksOf(inner, depth + 1));
  }
  return [{kind: "list", start: /\d/.test(mark) ? parseInt(mark, 10) : null, items, isLoose}, next];
}
function cellsOf(line) {
  const cells = line.trim().replace(/^\|/, "").split(/(?<!\\)\|/).map(cell => cell.trim().replaceAll("\\|", "|"));
  if (cells.length > 1 && !cells[cells.length - 1]) cells.pop();
  return cells;
}
function isTable(lines, at) {
  if (at + 1 >= lines.length || !lines[at].includes("|") || !lines[at + 1].includes("-")) return false;
  const rule = cellsOf(lines[at + 1]);
  return rule.every(cell => /^:?-+:?$/.test(cell)) && rule.length === cellsOf(lines[at]).length;
}
function tableAt(lines, at) {
  const sides = cellsOf(lines[at + 1]).map(cell => (cell.endsWith(":") ? (cell[0] === ":" ? "center" : "right") : ""));
  let next = at + 2;
  while (next < lines.length && lines[next].includes("|")) next += 1;
  return [{kind: "table", sides, head: cellsOf(lines[at]), rows: lines.slice(at + 2, next).map(cellsOf)}, next];
}

// --- elements ---

function drawnBlock(block) {
  switch (block.kind) {
    case "fence": return drawnFence(block);
    case "heading": return inline(block.text, element("h" + Math.min(6, block.level + 2)));
    case "rule": return element("hr");
    case "list": return drawnList(block);
    case "table": return drawnTable(block);
    case "quote": {
      const quote = element("blockquote");
      quote.append(...block.blocks.map(drawnBlock));
      return quote;
    }
    default: return inline(block.text, element("p"));
  }
}
function drawnFence(block) {
  const made = element("div", "fence"), bar = element("div", "bar"), pre = element("pre");
  pre.tabIndex = 0;
  pre.append(element("code", "", block.text));
  bar.append(element("span", "faint", block.name), copyButton(() => block.text, "Copy the code"));
  made.append(bar, pre);
  return made;
}
function drawnList(list) {
  const made = element(list.start === null ? "ul" : "ol");
  if (list.start !== null) made.start = list.start;
  for (const blocks of list.items) {
    const item = made.appendChild(element("li"));
    for (const [place, block] of blocks.entries()) {
      if (block.kind !== "paragraph" || list.isLoose) item.append(drawnBlock(block));
      else inline((place ? "\n" : "") + block.text.replace(/^\[ \](?= )/, "☐").replace(/^\[[xX]\](?= )/, "☑"), item);
    }
  }
  return made;
}
function drawnTable(block) {
  const around = element("div", "table"), table = around.appendChild(element("table"));
  around.tabIndex = 0;
  const addRow = (part, tag, cells) => {
    const row = part.appendChild(element("tr"));
    block.sides.forEach((side, column) => {
      row.append(inline(cells[column] ?? "", element(tag, side)));
    });
  };
  addRow(table.appendChild(element("thead")), "th", block.head);
  const body = table.appendChild(element("tbody"));
  for (const cells of block.rows) addRow(body, "td", cells);
  return around;
}

// A text that grows: `draw` parses and draws its last block alone, since those before it can't change any more.
class GrowingMarkdown {
  constructor(into, onFinal = () => {}) {
    this.into = into;
    this.onFinal = onFinal;
    this.numFinalChars = 0;
    this.numFinalNodes = 0;
  }
  draw(text) {
    const lines = text.slice(this.numFinalChars).replace(/\t/g, "    ").split("\n");
    const found = blocksOf(lines);
    while (this.into.childNodes.length > this.numFinalNodes) this.into.lastChild.remove();
    this.into.append(...found.map(drawnBlock));
    // The last line may still become something else, so a block that begins with it does not end the one before it.
    const latest = found.findLastIndex(block => block.at < lines.length - 1);
    if (latest <= 0) return;
    for (let place = 0; place < latest; place += 1) this.onFinal(this.into.childNodes[this.numFinalNodes + place]);
    this.numFinalNodes += latest;
    const raw = text.slice(this.numFinalChars).split("\n").slice(0, found[latest].at);
    this.numFinalChars += raw.reduce((sum, line) => sum + line.length + 1, 0);
  }
}

async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Pages that come by plain HTTP from another host have no clipboard, but they may copy a selection.
  const area = document.body.appendChild(element("textarea"));
  area.value = text;
  area.select();
  document.execCommand("copy");
  area.remove();
}
function button(text, title, onclick, className = "small") {
  const made = element("button", className, text);
  made.type = "button";
  made.title = title;
  made.onclick = onclick;
  return made;
}
function copyButton(text, title) {
  const made = button("Copy", title, async () => {
    await copyText(text());
    made.textContent = "Copied";
    setTimeout(() => { made.textContent = "Copy"; }, 1500);
  });
  return made;
}
