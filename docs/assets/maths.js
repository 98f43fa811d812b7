// Typesets what pymdownx.arithmatex has marked: \(...\) in a line, \[...\] on a line of its own.
for (const place of document.querySelectorAll(".arithmatex")) {
  const text = place.textContent.trim()
  try {
    katex.render(text.slice(2, -2), place, { displayMode: text.startsWith("\\[") })
  } catch (error) {
    console.error(error.message) // the formula stays as it was written
  }
}
