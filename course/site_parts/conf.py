"""Sphinx's settings for the site that `python -m course site` builds; a build's own come with -D."""

import json
import re
from pathlib import Path

from docutils import nodes

project = "Module 15"
html_title = "Advanced PyTorch Internals"
extensions = ["myst_nb", "sphinx_copybutton"]

# pages
nb_execution_mode = "off"  # the stored outputs are shown
nb_code_prompt_show, nb_code_prompt_hide = "Show the code", "Hide the code"
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # an exercise is a heading of the third level, wherever it stands

# everything comes from the site itself: neither MathJax nor anything else is fetched, and search needs no server
mathjax_path = "mathjax/tex-svg.js"
mathjax3_config = {"options": {"enableMenu": False}}
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["course.css"]
html_js_files = ["page.js"]

html_theme = "sphinx_book_theme"
html_theme_options = {
    "use_download_button": False,  # the pages have buttons of their own, for the student edition
    "use_fullscreen_button": False,
    "home_page_in_toc": True,
    "show_toc_level": 2,
    "footer_content_items": [],  # else "By Author name not set"
}
html_context = {"default_mode": "auto"}  # light or dark as the reader's system is
html_show_copyright = False
html_show_sphinx = False


# search: each section, and each term of the glossary, with its text
def sections_of(page, document):
    """What search finds on a page, in its order."""
    markup = (nodes.raw, nodes.math, nodes.math_block)  # figures as HTML, and LaTeX, which reads badly among the words
    for part in list(document.findall(lambda node: isinstance(node, markup))):
        part.parent.replace(part, nodes.Text("…"))
    title = next(document.findall(nodes.title)).astext()
    for section in document.findall(nodes.section):
        text = " ".join(part.astext() for part in section.children[1:] if not isinstance(part, nodes.section))
        name = section.children[0].astext()
        yield found(page, section["ids"][0], name, "" if name == title else title, text)
    for item in document.findall(nodes.definition_list_item):
        for term in item.findall(nodes.term):
            if term["ids"]:
                yield found(page, term["ids"][0], term.astext(), title, item.children[-1].astext())


def found(page, anchor, title, lesson, text):
    """An entry of SECTIONS."""
    return {"page": page, "anchor": anchor, "title": title, "lesson": lesson, "text": re.sub(r"\s+", " ", text)}


def write_sections(app, error):
    """The file that search.js reads."""
    if error is None:
        pages = sorted(app.env.found_docs)
        entries = [entry for page in pages for entry in sections_of(page, app.env.get_doctree(page))]
        script = f"const SECTIONS = {json.dumps(entries, ensure_ascii=False)};\n"
        Path(app.outdir, "_static", "sections.js").write_text(script, encoding="utf-8")


def add_search(app, page, template, context, document):
    """Both scripts, on the page of search alone."""
    if page == "search":
        app.add_js_file("sections.js", priority=900)
        app.add_js_file("search.js", priority=901)


def setup(app):
    app.connect("html-page-context", add_search)
    app.connect("build-finished", write_sections)
