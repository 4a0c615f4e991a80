"""Sphinx's settings for the site that `python -m course site` builds; a build's own come with -D."""

project = "Module 15"
html_title = "Advanced PyTorch Internals"
extensions = ["myst_nb", "sphinx_copybutton"]
exclude_patterns = []

# pages
nb_execution_mode = "off"  # the stored outputs are shown
nb_merge_streams = True
nb_number_source_lines = False
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
suppress_warnings = ["myst.header"]  # an exercise is a heading of the third level, wherever it stands

# everything comes from the site itself: neither MathJax nor anything else is fetched, and search needs no server
mathjax_path = "mathjax/tex-svg.js"
mathjax3_config = {"options": {"enableMenu": False}}
html_show_search_summary = False  # it would be fetched, which a page that was opened as a file can't do
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["course.css"]

html_theme = "sphinx_book_theme"
html_theme_options = {
    "use_download_button": False,  # the pages have buttons of their own, for the student edition
    "use_fullscreen_button": False,
    "home_page_in_toc": True,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "footer_content_items": [],  # else "By Author name not set"
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_context = {"default_mode": "auto"}  # light or dark as the reader's system is
html_show_copyright = False
html_show_sphinx = False
