// Writes the page that the service ships: node build.mjs [FOLDER]. Equal sources give equal bytes.
import { build } from 'esbuild';
import { mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { basename, join } from 'node:path';

const folder = process.argv[2] ?? '../roller_svc/service/page';
mkdirSync(folder, { recursive: true });
for (const name of readdirSync(folder)) rmSync(join(folder, name));

const { metafile } = await build({
  entryPoints: ['src/app.js', 'src/page.css'],
  outdir: folder,
  entryNames: '[name]-[hash]',
  chunkNames: '[name]-[hash]',
  bundle: true,
  format: 'esm',
  splitting: true,
  minify: true,
  charset: 'utf8',
  target: 'es2022',
  legalComments: 'none', // licenses.txt has them
  metafile: true,
});

// What `roller explain --html` writes into its file, as one script.
const single = await build({
  entryPoints: ['src/file.js'],
  outdir: folder,
  entryNames: '[name]-[hash]',
  bundle: true,
  format: 'iife',
  minify: true,
  charset: 'utf8',
  target: 'es2022',
  legalComments: 'none',
  metafile: true,
});

const outputs = Object.entries({ ...metafile.outputs, ...single.metafile.outputs });
const nameOf = (source) => basename(outputs.find(([, output]) => output.entryPoint === source)[0]);
// What the page needs at once is asked for with it, and not after the first file has come.
const appOf = outputs.find(([, output]) => output.entryPoint === 'src/app.js')[1];
const needed = appOf.imports.filter(({ kind }) => kind === 'import-statement').map(({ path }) => `<link rel="modulepreload" href="/page/${basename(path)}">`);
const index = readFileSync('src/index.html', 'utf8')
  .replace('APP', `/page/${nameOf('src/app.js')}`)
  .replace('<!-- PRELOADS -->', needed.join('\n'))
  .replace('CSS', `/page/${nameOf('src/page.css')}`);
writeFileSync(join(folder, 'index.html'), index);

// The licences of the packages whose code is in the files.
const sources = outputs.map(([, output]) => output).flatMap((output) => Object.keys(output.inputs));
const packages = new Set(sources.map((source) => /node_modules\/((?:@[^/]+\/)?[^/]+)/.exec(source)?.[1]).filter(Boolean));
const licences = [...packages].sort().map((name) => {
  const own = join('node_modules', name), { version, license } = JSON.parse(readFileSync(join(own, 'package.json'), 'utf8'));
  const file = readdirSync(own).find((each) => /^licen[cs]e/i.test(each));
  return `${name} ${version} (${license})\n\n${readFileSync(join(own, file), 'utf8').trim()}\n`;
});
writeFileSync(join(folder, 'licenses.txt'), licences.join(`\n${'-'.repeat(80)}\n\n`));
