// A subset of Markdown as elements: what chat models write. No HTML is parsed, and no link leaves http and https.
//
// `blocks` and `inline` return plain trees, so that they can be tested without a browser; `MarkdownView` makes elements
// of them.

import { h } from "./dom.js";

const MAX_DEPTH = 8;
// Characters in which the end of an emphasis or a link is searched, so that the time stays linear in the text.
const MAX_REACH = 2000;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])[ \t]+(.*)$/;
const DELIMITERS = /^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const URL_START = /^https?:\/\/[^\s<>"`]+/i;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;

// -- blocks -----------------------------------------------------------------------------------------------------------

// Return the blocks of a text. Each has a kind and `source`, from which alone it was made.
export function blocks(text, depth = 0) {
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, end] = blockAt(lines, at, depth);
    found.push({ ...block, source: lines.slice(at, end).join("\n") });
    at = end;
  }
  return found;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return fenced(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [{ kind: "heading", level: heading[1].length, parts: inline(heading[2].replace(/[ \t]#+[ \t]*$/, "")) }, at + 1];
  if (RULE.test(line)) return [{ kind: "rule" }, at + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) {
    let end = at;
    while (end < lines.length && QUOTE.test(lines[end])) end += 1;
    return [{ kind: "quote", blocks: blocks(lines.slice(at, end).map((one) => one.replace(QUOTE, "")).join("\n"), depth + 1) }, end];
  }
  if (isTable(lines, at)) return table(lines, at);
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, at, depth);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !begins(lines, end)) end += 1;
  return [{ kind: "paragraph", parts: inline(lines.slice(at, end).map((one) => one.trim()).join("\n")) }, end];
}

function begins(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line) || isTable(lines, at);
}

function fenced(lines, at, [, mark, info]) {
  const isEnd = (line) => line.trim().length >= mark.length && line.trim() === mark[0].repeat(line.trim().length);
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  return [{ kind: "code", language: info.trim().split(/\s/)[0], text: lines.slice(at + 1, end).join("\n") }, Math.min(end + 1, lines.length)];
}

function isTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && DELIMITERS.test(lines[at + 1])
    && cells(lines[at]).length === cells(lines[at + 1]).length;
}

function table(lines, at) {
  const head = cells(lines[at]);
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) end += 1;
  const rows = lines.slice(at + 2, end).map((line) => head.map((_, column) => inline(cells(line)[column] ?? "")));
  return [{ kind: "table", head: head.map((one) => inline(one)), rows }, end];
}

function cells(line) {
  const found = [""];
  let inCode = false;
  const text = line.trim().replace(/^\|/, "").replace(/([^\\]|^)\|$/, "$1");
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") {
      found[found.length - 1] += "|";
      at += 1;
    } else if (text[at] === "|" && !inCode) found.push("");
    else {
      if (text[at] === "`") inCode = !inCode;
      found[found.length - 1] += text[at];
    }
  }
  return found.map((one) => one.trim());
}

function list(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const isOrdered = mark.length > 1;
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[1].length > indent.length + 1 || (item[2].length > 1) !== isOrdered || RULE.test(lines[end])) break;
    const width = item[1].length + 2;
    const own = [item[3]];
    end += 1;
    while (end < lines.length) {
      const line = lines[end];
      const spaces = line.length - line.trimStart().length;
      if (!line.trim()) {
        // A blank line belongs to the item if something of it follows.
        const next = lines.slice(end + 1, end + 3).find((one) => one.trim());
        if (next === undefined || next.length - next.trimStart().length < width) break;
      } else if (spaces < width && (begins(lines, end) || !lines[end - 1].trim())) break;
      own.push(line.slice(Math.min(spaces, isOrdered ? item[1].length + item[2].length + 1 : width)));
      end += 1;
    }
    items.push(blocks(own.join("\n"), depth + 1));
    while (end < lines.length && !lines[end].trim() && ITEM.exec(lines[end + 1] ?? "")?.[1].length === indent.length) end += 1;
  }
  return [{ kind: "list", start: isOrdered ? parseInt(mark, 10) : null, items }, end];
}

// -- inside of a line -------------------------------------------------------------------------------------------------

// Return texts, and objects with a kind: code, strong, em, del and link.
export function inline(text, depth = 0) {
  const found = [];
  // For each mark, the position up to which none of its kind ends an emphasis.
  const openUntil = {};
  let plain = "";
  let at = 0;
  const push = (part, end) => {
    if (plain) found.push(plain);
    plain = "";
    found.push(part);
    at = end;
  };
  while (at < text.length) {
    const special = depth < MAX_DEPTH ? specialAt(text, at, depth, openUntil) : null;
    if (special) push(...special);
    else if (text[at] === "\\" && PUNCTUATION.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else if (text[at] === "`") {
      const run = /^`+/.exec(text.slice(at, at + MAX_REACH))[0];
      plain += run;
      at += run.length;
    } else {
      plain += text[at];
      at += 1;
    }
  }
  if (plain) found.push(plain);
  return found;
}

function specialAt(text, at, depth, openUntil) {
  const char = text[at];
  if (char === "`") return code(text, at);
  if (char === "[" || (char === "!" && text[at + 1] === "[")) return link(text, at, depth);
  if (char === "*" || char === "_" || char === "~") return emphasis(text, at, depth, openUntil);
  if (char === "<" || ((char === "h" || char === "H") && !WORD.test(text[at - 1] ?? ""))) return bareLink(text, at);
  return null;
}

function code(text, at) {
  const mark = /^`+/.exec(text.slice(at, at + MAX_REACH))[0];
  for (let end = text.indexOf(mark, at + mark.length); end !== -1 && end - at < MAX_REACH; end = text.indexOf(mark, end)) {
    const run = /^`+/.exec(text.slice(end, end + MAX_REACH))[0].length;
    if (run === mark.length) {
      const inner = text.slice(at + mark.length, end);
      return [{ kind: "code", text: /^ .*[^ ].* $/s.test(inner) ? inner.slice(1, -1) : inner }, end + run];
    }
    end += run;
  }
  return null;
}

function link(text, at, depth) {
  if (!text.slice(at, at + MAX_REACH).includes("](")) return null;
  const open = text[at] === "!" ? at + 1 : at;
  let level = 0;
  let close = open;
  for (; close < text.length && close - open < MAX_REACH; close += 1) {
    if (text[close] === "\\") close += 1;
    else if (text[close] === "[") level += 1;
    else if (text[close] === "]" && (level -= 1) === 0) break;
  }
  if (text[close] !== "]" || text[close + 1] !== "(") return null;
  const target = /^\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+"[^"]*")?\s*\)/.exec(text.slice(close + 1, close + 1 + MAX_REACH));
  const url = target && safeUrl(target[1]);
  if (!url) return null;
  return [{ kind: "link", url, parts: inline(text.slice(open + 1, close), MAX_DEPTH - 1 > depth ? depth + 1 : MAX_DEPTH) }, close + 1 + target[0].length];
}

function bareLink(text, at) {
  const isBracketed = text[at] === "<";
  const match = URL_START.exec(text.slice(at + isBracketed, at + MAX_REACH));
  if (!match) return null;
  if (isBracketed && text[at + 1 + match[0].length] !== ">") return null;
  const shown = isBracketed ? match[0] : trimmed(match[0]);
  const url = safeUrl(shown);
  return url && [{ kind: "link", url, parts: [shown] }, at + shown.length + 2 * isBracketed];
}

// A URL without the punctuation that ends the sentence around it.
function trimmed(url) {
  let end = url.length;
  while (end && (/[.,;:!?'*_~\]]/.test(url[end - 1]) || (url[end - 1] === ")" && !url.slice(0, end).includes("(")))) end -= 1;
  return url.slice(0, end);
}

// Return the URL if it is one of http or https, else null.
export function safeUrl(text) {
  try {
    const url = new URL(text);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}

function emphasis(text, at, depth, openUntil) {
  const char = text[at];
  const mark = text[at + 1] === char ? char + char : char;
  if (mark === "~" || !text[at + mark.length] || /\s/.test(text[at + mark.length])) return null;
  if (char === "_" && WORD.test(text[at - 1] ?? "")) return null;
  const end = closing(text, at + mark.length, openUntil[mark] ?? 0, mark);
  if (end === -1) {
    openUntil[mark] = at + MAX_REACH;
    return null;
  }
  const kind = char === "~" ? "del" : mark.length === 2 ? "strong" : "em";
  return [{ kind, parts: inline(text.slice(at + mark.length, end), depth + 1) }, end + mark.length];
}

function closing(text, begin, from, mark) {
  const last = Math.min(text.length, begin + MAX_REACH);
  for (let at = Math.max(begin, from); at < last; at += 1) {
    if (text[at] === "\\") at += 1;
    else if (text[at] === "`") at = (code(text, at)?.[1] ?? at + 1) - 1;
    else if (text[at] === mark[0]) {
      let run = 1;
      while (text[at + run] === mark[0]) run += 1;
      const fits = mark.length === 1 ? run % 2 === 1 : run >= 2;
      const isWord = mark[0] === "_" && WORD.test(text[at + run] ?? "");
      // Of three, the outer ones end what began first.
      if (fits && at > begin && !/\s/.test(text[at - 1]) && !isWord) return at + run - mark.length;
      at += run - 1;
    }
  }
  return -1;
}

// -- elements ---------------------------------------------------------------------------------------------------------

// Element of a text that grows. Elements of unchanged blocks stay, with the reader's selection.
export class MarkdownView {
  element = h("div", { class: "text markdown" });
  #sources = [];

  update(text) {
    const found = blocks(text);
    let same = 0;
    while (same < found.length && found[same].source === this.#sources[same]) same += 1;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    for (const block of found.slice(same)) this.element.append(shown(block));
    this.#sources = found.map((one) => one.source);
    return this.element;
  }
}

function shown(block) {
  switch (block.kind) {
    case "code": return codeBlock(block);
    // The page has headings of its own.
    case "heading": return h(`h${Math.min(6, block.level + 1)}`, null, block.parts.map(part));
    case "rule": return h("hr");
    case "quote": return h("blockquote", null, block.blocks.map(shown));
    case "table": return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" }, h("table", null,
      h("thead", null, h("tr", null, block.head.map((one) => h("th", { scope: "col" }, one.map(part))))),
      h("tbody", null, block.rows.map((row) => h("tr", null, row.map((one) => h("td", null, one.map(part))))))));
    case "list": return h(block.start === null ? "ul" : "ol", { start: block.start }, block.items.map((item) => h("li", null, item.map(shown))));
    default: return h("p", null, block.parts.map(part));
  }
}

function part(one) {
  if (typeof one === "string") return one;
  if (one.kind === "code") return h("code", null, one.text);
  const inner = one.parts.map(part);
  return one.kind === "link" ? h("a", { href: one.url, target: "_blank", rel: "noopener noreferrer" }, inner) : h(one.kind, null, inner);
}

function codeBlock(block) {
  const copy = globalThis.navigator?.clipboard && h("button", { type: "button", onclick: async (event) => {
    const button = event.currentTarget;
    await navigator.clipboard.writeText(block.text);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  } }, "Copy");
  return h("div", { class: "code" }, h("div", { class: "soft small" }, h("span", null, block.language), copy), h("pre", { tabindex: "0" }, h("code", null, block.text)));
}
