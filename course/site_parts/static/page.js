/* What the theme leaves undone on a page: its two buttons open nothing, because it listens to the first pair, which is in
   the bar that course.css hides; its contents don't follow the page, and break code in mid-word; a table that is wider
   than a phone doesn't say so; a player doesn't count its steps, and is small there; and the map's arcs don't answer to
   the mouse. */
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

  for (const code of pane?.querySelectorAll("code .pre") ?? []) {
    code.replaceChildren(...code.textContent.split(/(?<=[._(=/])/).flatMap((part) => [part, document.createElement("wbr")]));
  }

  for (const frame of document.querySelectorAll(".pst-scrollable-table-container")) {
    frame.classList.toggle("wider", frame.scrollWidth > frame.clientWidth);
  }

  for (const player of document.querySelectorAll(".animation")) {
    const [picture, slider] = [player.querySelector("img"), player.querySelector(".anim-slider")];
    const count = document.createElement("span");
    count.className = "count";
    player.querySelector(".anim-buttons").append(count);
    const tell = () => (count.textContent = `${Number(slider.value) + 1} of ${Number(slider.max) + 1}`);
    new MutationObserver(tell).observe(picture, { attributes: true }); // each step is another picture
    tell();
    picture.addEventListener("click", () => player.classList.toggle("large")); // means something on a phone only
  }

  for (const stop of document.querySelectorAll(".map .stop")) {
    const arcs = document.querySelectorAll(`.map [data-to="${stop.dataset.topic}"]`);
    for (const [event, on] of [["mouseenter", true], ["mouseleave", false]]) {
      stop.addEventListener(event, () => {
        stop.closest(".map").classList.toggle("asked", on);
        arcs.forEach((arc) => arc.classList.toggle("on", on));
      });
    }
  }
});
