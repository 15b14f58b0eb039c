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

const outputs = Object.entries(metafile.outputs);
const nameOf = (source) => basename(outputs.find(([, output]) => output.entryPoint === source)[0]);
const index = readFileSync('src/index.html', 'utf8')
  .replace('APP', `/page/${nameOf('src/app.js')}`)
  .replace('CSS', `/page/${nameOf('src/page.css')}`);
writeFileSync(join(folder, 'index.html'), index);

// The licences of the packages whose code is in the files.
const sources = Object.values(metafile.outputs).flatMap((output) => Object.keys(output.inputs));
const packages = new Set(sources.map((source) => /node_modules\/((?:@[^/]+\/)?[^/]+)/.exec(source)?.[1]).filter(Boolean));
const licences = [...packages].sort().map((name) => {
  const own = join('node_modules', name), { version, license } = JSON.parse(readFileSync(join(own, 'package.json'), 'utf8'));
  const file = readdirSync(own).find((each) => /^licen[cs]e/i.test(each));
  return `${name} ${version} (${license})\n\n${readFileSync(join(own, file), 'utf8').trim()}\n`;
});
writeFileSync(join(folder, 'licenses.txt'), licences.join(`\n${'-'.repeat(80)}\n\n`));
