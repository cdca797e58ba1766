// Texts for the tests of the page: everything that its Markdown shows, and what must never run.

export const SAMPLE = `# A heading

A paragraph with **strong**, *emphasis*, ~~deleted~~, \`inline code\`, a [link](https://example.org/a "title") and
an address: https://example.org/path_(x). The formula \\(a_1 * b_2\\) stays as it is written.

## A table

| Device | Steps per second | Note |
|:-------|-----------------:|:-----|
| CPU | 120 | recorded program |
| GPU | 4 100 | one graph launch for *sixteen* steps |
| GPU, eager | 900 | a launch for every op |

> A quote with a second line
> > and a quote inside, with \`code\`.

1. First
   - nested one
     - nested two
   - nested three
2. Second, with code:
   \`\`\`rust
   fn main() {
       let steps: Vec<u32> = (0..4).collect(); // four steps
       println!("{} steps, {:?}", steps.len(), 'x');
   }
   \`\`\`
3. Third

- [x] done
- [ ] to do

---

\`\`\`python
def replay(graph, steps=16):
    """Replays a recorded graph."""
    for step in range(steps):
        graph.launch(step)  # the host does nothing else
    return None
\`\`\`

\`\`\`json
{"model": "smollm2", "stream": true, "max_tokens": 16}
\`\`\`

\`\`\`sh
curl -s http://127.0.0.1:8000/v1/models --header "accept: application/json" | jq '.data[0].id' # a long line that must scroll inside its box
\`\`\`
`;

export const HOSTILE = `<img src=x onerror=window.ran=1> <script>window.ran=1</script> <svg/onload=window.ran=1>

[click](javascript:window.ran=1) [click](JaVaScRiPt:window.ran=1) [data](data:text/html,<script>window.ran=1</script>)
![picture](https://example.org/p.png) ![bad](javascript:window.ran=1) <javascript:window.ran=1>

[good](https://example.org/?a="onclick=window.ran=1) <https://example.org/"onmouseover="window.ran=1>

| <img src=x onerror=window.ran=1> | [x](vbscript:window.ran=1) |
|---|---|
| <iframe src="javascript:window.ran=1"></iframe> | \`<img src=x onerror=window.ran=1>\` |

- <a href="javascript:window.ran=1">a</a>
  > <style>body { display: none }</style>

\`\`\`html"><img src=x onerror=window.ran=1>
</code></pre><script>window.ran=1</script>
\`\`\`

# <b onclick="window.ran=1">bold</b> &lt;img src=x onerror=window.ran=1&gt;
`;
