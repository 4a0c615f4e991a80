/* What the theme leaves undone on a page: its two buttons open nothing, because it listens to the first pair, which is in
   the bar that course.css hides; and its contents don't follow the page. */
document.addEventListener("DOMContentLoaded", () => {
  for (const side of ["primary", "secondary"]) {
    const [listened, ...shown] = document.querySelectorAll(`.${side}-toggle`);
    for (const button of shown) {
      button.addEventListener("click", () => listened.click());
    }
  }

  const pane = document.querySelector("#pst-secondary-sidebar");
  let wait;
  document.addEventListener("scroll", () => {
    clearTimeout(wait);
    wait = setTimeout(() => {
      const active = [...(pane?.querySelectorAll(".nav-link.active") ?? [])].pop();
      if (!active) return;
      const [link, frame] = [active.getBoundingClientRect(), pane.getBoundingClientRect()];
      if (link.top < frame.top || link.bottom > frame.bottom) {
        pane.scrollTop += link.top - frame.top - frame.height / 3; // not scrollIntoView, which moves the page, too
      }
    }, 150);
  });
});
