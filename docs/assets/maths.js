// Typesets the formulas that pymdownx.arithmatex has marked: \(...\) inline, \[...\] as a display.
for (const place of document.querySelectorAll(".arithmatex")) {
  const text = place.textContent.trim()
  try {
    katex.render(text.slice(2, -2), place, { displayMode: text.startsWith("\\[") })
  } catch (error) {
    console.error(error.message) // the page shows the source of the formula
  }
}
