import { defaultKeymap, history, historyKeymap } from '@codemirror/commands';
import { HighlightStyle, StreamLanguage, syntaxHighlighting } from '@codemirror/language';
import { lintGutter, setDiagnostics } from '@codemirror/lint';
import { EditorState } from '@codemirror/state';
import { EditorView, keymap } from '@codemirror/view';
import { tags } from '@lezer/highlight';

const language = StreamLanguage.define({
  token(stream) {
    if (stream.eatSpace()) return null;
    if (stream.match(/#.*/)) return 'comment';
    if (stream.match(/(where|in|and|or|not|true|false)\b/)) return 'keyword';
    if (stream.match(/\d+(\.\d+)?(e[+-]?\d+)?/)) return 'number';
    if (stream.match(/"[^"]*"|`[^`]*`/)) return 'string';
    if (stream.match(/[+*<>&|]?=[!.]?|[-+*/%<>]+/)) return 'operator';
    if (stream.match(/[A-Za-z_]\w*(?=\s*\()/)) return 'keyword';
    if (stream.match(/[A-Za-z_]\w*(?=\s*\[)/)) return 'typeName';
    if (stream.match(/\w+/)) return 'variableName';
    stream.next();
    return null;
  },
});

const style = HighlightStyle.define([
  { tag: tags.comment, color: 'var(--ink-3)' },
  { tag: tags.keyword, color: 'var(--word)' },
  { tag: tags.number, color: 'var(--number)' },
  { tag: tags.string, color: 'var(--string)' },
  { tag: tags.typeName, color: 'var(--accent)' },
  { tag: tags.operator, color: 'var(--ink-2)' },
  { tag: tags.variableName, color: 'var(--ink)' },
]);

const nonce = document.querySelector('meta[property="csp-nonce"]').nonce;

export function createEditor(parent, doc, changed) {
  let isShowing = false; // a text that was not typed
  const extensions = [
    history(),
    keymap.of([...defaultKeymap, ...historyKeymap]), // without Tab, which goes to the next part of the page
    language,
    syntaxHighlighting(style),
    EditorView.lineWrapping,
    lintGutter(),
    EditorView.cspNonce.of(nonce),
    EditorView.contentAttributes.of({ 'aria-label': 'expression', 'data-testid': 'expression' }),
    EditorView.updateListener.of((update) => update.docChanged && !isShowing && changed(update.state.doc.toString())),
  ];
  const view = new EditorView({ parent, state: EditorState.create({ doc, extensions }) });

  function position(lineNumber, column) {
    const line = view.state.doc.line(Math.min(lineNumber, view.state.doc.lines));
    return Math.min(line.to, line.from + column - 1);
  }
  return {
    destroy: () => view.destroy(),
    mark(errors) {
      const marks = errors.filter((error) => error.line).map(({ line, column, end_column: end, message, hint }) => {
        const from = position(line, column);
        return { from, to: Math.max(from, position(line, end ?? column + 1)), severity: 'error', message: hint ? `${message} – ${hint}` : message };
      });
      view.dispatch(setDiagnostics(view.state, marks));
    },
    show(text) {
      if (text === view.state.doc.toString()) return;
      isShowing = true;
      view.dispatch({ changes: { from: 0, to: view.state.doc.length, insert: text } });
      isShowing = false;
    },
  };
}
