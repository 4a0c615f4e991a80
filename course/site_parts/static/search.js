/* Search that names sections and shows where the words stand, on a page that was opened as a file, too: Sphinx's own
   fetches the pages for that, which a browser refuses to files. `SECTIONS` is made by conf.py. */

/* before Sphinx begins to search */
document.addEventListener("DOMContentLoaded", () => {
  Search.performSearch = showSections;
});

const IGNORED = new Set(("a an and are as at be by can do does for from has have how i if in into is it its my of on or " +
  "so than that the their then there this to was what when where which why will with you your").split(" "));
const COME_LAST = ["Setup", "Learning objectives", "Self-assessment"];

function showSections(query) {
  const given = query.toLowerCase().split(/\s+/).filter(Boolean);
  const telling = given.filter((word) => !IGNORED.has(word));
  const words = telling.length ? telling : given;
  const phrase = given.join(" ");
  const scored = SECTIONS.map((section) => ({ ...section, ...score(section, words, phrase) }));
  const most = Math.max(...scored.map((section) => section.has)); // of the words
  const found = scored
    .filter((section) => section.has === most && most > 0)
    .sort((one, other) => other.points - one.points)
    .slice(0, 40);

  const output = document.getElementById("search-results");
  const count = found.length === 1 ? "One section has it." : `${found.length} sections have it, the best first.`;
  const nowhere = words.filter((word) => !SECTIONS.some((section) => score(section, [word], word).has));
  const none = `No section has ${nowhere.map((word) => `“${word}”`).join(" or ") || "all of these words"}.`;
  const others = found.length ? " These have most of the words:" : "";
  output.replaceChildren(element("p", most === words.length && most > 0 ? count : none + others));
  const list = output.appendChild(element("ul", "", "search"));
  for (const section of found) {
    const item = list.appendChild(element("li", ""));
    item.appendChild(element("a", section.title)).href = `${section.page}.html#${section.anchor}`;
    item.append(` ${section.lesson}`);
    item.appendChild(excerpt(section.text, words));
  }
}

/* How many of the words a section has, and what that is worth: titles and terms of the glossary come first, and what has
   several words as they were given. */
function score(section, words, phrase) {
  let [has, points] = [0, 0];
  for (const word of words) {
    const inTitle = section.title.match(beginning(word))?.length ?? 0;
    const inText = section.text.match(beginning(word))?.length ?? 0;
    if (inTitle || inText) has += 1;
    points += 10 * inTitle + Math.min(inText, 5);
  }
  if (phrase.includes(" ")) points += 10 * [section.title, section.text].filter((text) => text.match(beginning(phrase))).length;
  const comesLast = section.page.endsWith("_solutions") || section.page === "INSTRUCTOR_GUIDE" || COME_LAST.includes(section.title);
  return { has, points: comesLast ? points / 100 : points };
}

/* Finds a word, or what begins with it, also behind an underscore: "reduce" in all_reduce, "ring" not in during. */
function beginning(...words) {
  const escaped = words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  return new RegExp(`(?<![a-z])(${escaped.join("|")})`, "gi");
}

function excerpt(text, words) {
  const line = element("p", "", "context");
  const start = Math.max(0, text.search(beginning(...words)) - 80);
  let part = text.slice(start, start + 240);
  if (start) part = part.replace(/^\S*/, "…");
  if (text.length > start + 240) part = part.replace(/\S*$/, "…");
  part.split(beginning(...words)).forEach((piece, place) => line.append(place % 2 ? element("mark", piece) : piece));
  return line;
}

function element(name, text, style = "") {
  const made = document.createElement(name);
  made.textContent = text;
  made.className = style;
  return made;
}
