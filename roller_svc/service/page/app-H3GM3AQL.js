import{$ as ke,A as F,B as Bt,C as bt,D as vt,E as J,F as S,G as Pt,H as yt,I as xt,J as pe,K as T,L as qt,M as W,N as me,O as fe,P as he,Q as ge,R as be,S as Dt,T as wt,U as ve,V as ye,W as xe,X as we,Y as Kt,Z as V,_ as kt,aa as Me,b as ne,ba as _e,c as Z,d as ot,e as oe,f as re,g as ft,h as ie,i as G,j as At,k as le,l as Nt,m as ce,n as B,o as Lt,p as ue,q as Rt,r as Q,s as ht,t as h,u as $e,v as de,w as P,x as It,y as tt,z as gt}from"./chunk-6QE6DFTJ.js";import{A as ae,D as mt,a as Xt,b as O,c as R,d as $t,e as r,f as g,g as w,h as I,i as E,j as dt,k as v,l as U,m as pt,n as nt,o as jt,p as M,q as Zt,w as Qt,x as te,y as ee,z as se}from"./chunk-PCYESTOY.js";var Ht=["mma","fma","wgmma","mfma","compute"],ss=["exponentials","transform","update","packing"],as={launch:"var(--launch)",exposed:"var(--exposed)"};function _(t,e){let s=t.levels.map(o=>o.name),[a,n]=t.tile_levels;return e===n?"var(--thread)":e===a?"var(--block)":e===s[0]?"var(--outer)":s.includes(e)?s.indexOf(e)<s.indexOf(a)?"var(--between)":"var(--inner)":Ht.includes(e)||e==="arithmetic"?"var(--compute)":ss.includes(e)?"var(--special)":as[e]??"var(--other)"}var q=(t,e)=>`color-mix(in oklab, ${_(t,e)} 70%, var(--ink))`;var st=560,C=300,Mt=70,_t=78,H=12,K=36,et={x:st-42,columns:2,rows:15},D=4,Se=t=>t.outcome==="accepted",ns=t=>t.outcome==="rejected",Ut=(t,e)=>t.kind==="scale-up"&&!e.saturated;function os(t,e){let s=[];for(let a=e;a!=null;a=t[a].parent)s.push(a);return s}function rs(t){return t.filter(s=>s.traffic_bytes>0).length?{read:s=>s.traffic_bytes,show:w,title:"traffic from the level outside"}:{read:s=>s.seconds,show:g,title:"estimate of the best program with it"}}var Oe=(t,e,s,a)=>n=>s+(a-s)*Math.log(n/t)/Math.log(e/t);function Te(t,e){let s=t.filter(a=>a>0);return s.length?[Math.min(...s)/e,Math.max(...s)*e]:[1,2]}function is([t,e]){let s=Math.ceil(Math.log2(t)),a=Math.floor(Math.log2(e)),n=Math.ceil((a-s+1)/8)||1;return Array.from({length:Math.max(0,Math.floor((a-s)/n)+1)},(o,i)=>2**(s+i*n))}function ls(t,e){let s=rs(t),a=t.filter(u=>s.read(u)>0),n=Te([...a.map(u=>u.footprint_bytes),e],1.5),o=Te(a.map(s.read),1.2),i=Oe(...n,Mt,st-_t),c=Oe(...o,C-K,H),p=0;return{points:t.map(u=>{if(u.footprint_bytes>0&&s.read(u)>0)return[i(u.footprint_bytes),c(s.read(u))];let y=p++%(et.columns*et.rows);return[et.x+16*(y%et.columns),H+24+15*Math.floor(y/et.columns)]}),x:i,y:c,xs:n,ys:o,upright:s,refused:p}}function Ce({tried:t,now:e}){let{device:s}=h.value,a=t.steps,n=_(s,t.level),o=t.capacity_bytes,{points:i,x:c,y:p,xs:l,ys:u,upright:y,refused:$}=ls(a,o),f=new Set(os(a,e)),m=new Set((T.value?.found??[]).filter(d=>d.search===S.value).map(d=>d.step)),b=`${M(a.length,"tile")} tried for ${t.level}: footprint against ${y.title}`;return r`<svg viewBox=${`0 0 ${st} ${C}`} class="landscape" role="img" aria-label=${b} data-testid="tiles">
    ${is(l).map(d=>r`<line x1=${c(d)} x2=${c(d)} y1=${H} y2=${C-K} class="grid" />
      <text x=${c(d)} y=${C-K+13} class="tick" text-anchor="middle">${w(d)}</text>`)}
    <line x1=${Mt} x2=${st-_t} y1=${C-K} y2=${C-K} class="axis-line" />
    <text x=${(Mt+st-_t)/2} y=${C-4} class="label" text-anchor="middle">footprint in ${t.level}</text>
    <text x=${-(C-K)/2} y="11" class="label" text-anchor="middle" transform="rotate(-90)">${y.title}</text>
    ${[u[0]*1.2,Math.sqrt(u[0]*u[1]),u[1]/1.2].map(d=>r`<text x=${Mt-5} y=${p(d)+3} class="tick" text-anchor="end">${y.show(d)}</text>`)}
    ${o>0&&r`<rect x=${c(o)} y=${H} width=${st-_t-c(o)+14} height=${C-K-H} class="wall" />
      <line x1=${c(o)} x2=${c(o)} y1=${H} y2=${C-K} style=${`stroke:${n};stroke-width:1.5`} />
      <text x=${c(o)-4} y=${H+8} class="tick" text-anchor="end" style=${`fill:${q(s,t.level)}`}>capacity ${w(o)}</text>`}
    ${$>0&&r`<text x=${et.x+8} y=${H+8} class="tick" text-anchor="middle">refused early</text>`}
    ${a.map((d,k)=>d.parent!=null&&r`<line x1=${i[d.parent][0]} y1=${i[d.parent][1]} x2=${i[k][0]} y2=${i[k][1]}
      class=${f.has(k)?"edge on":k<=e?"edge":"edge later"} style=${f.has(k)?`stroke:${n}`:""} />`)}
    ${a.map((d,k)=>{let[A,N]=i[k];return r`<g class=${k>e?"spot later":"spot"} onClick=${()=>V(S.value,k)}>
        <circle cx=${A} cy=${N} r="9" fill="transparent" />
        ${ns(d)?r`<path d=${`M${A-D} ${N-D}l${2*D} ${2*D}m0-${2*D}l-${2*D} ${2*D}`} class="cross" />`:r`<circle cx=${A} cy=${N} r=${D} style=${Ut(t,d)?`fill:var(--paper);stroke:${n};stroke-width:1.5`:`fill:${n}`} />`}
        ${m.has(k)&&r`<circle cx=${A} cy=${N} r="8" class="won" />`}${k===e&&r`<circle cx=${A} cy=${N} r="11" class="now" />`}
        <title>${nt(t.axes,d.tile)}: ${d.footprint_bytes>0?w(d.footprint_bytes):"no footprint"}, ${d.limit?.rule??d.outcome}${d.seconds?`, ${g(d.seconds)}`:""}</title>
      </g>`})}
  </svg>`}var Ee=({tried:t})=>r`<ul class="legend">
  ${t.kind==="scale-up"&&r`<li><i class="ring" style=${`--c:${_(h.value.device,t.level)}`}></i>fits</li>
    <li><i class="disc" style=${`--c:${_(h.value.device,t.level)}`}></i>fits and is large enough</li>`}
  <li><i class="bad">✕</i>refused</li><li><i class="ring" style="--c:var(--ink)"></i>of the chosen program</li></ul>`;var Gt=168,cs=64,us=["k","inner","reduce","tap"];function $s({roles:t,extents:e}){let s=i=>t.indexOf(i);if(s("m")>=0&&s("n")>=0)return[s("m"),s("n"),s("k")];let a=t.map((i,c)=>c).filter(i=>!us.includes(t[i])),[n=0,o=n]=a.sort((i,c)=>e[c]-e[i]).slice(0,2).sort((i,c)=>i-c);return[n,o,s("k")]}function ds(t,e){let[s,a]=h.value.device.tile_levels,n=T.value?.program.tiles,o=n&&Object.keys(n[s]??{}).join()===t.axes.join(),i=c=>t.axes.map(p=>n[c]?.[p]??1);return t.level===s?{block:e.tile,thread:e.base??t.base??(o?i(a):e.tile)}:{block:o?i(s):e.tile,thread:e.tile}}function ps({name:t,size:e,inner:s,colour:a,innerColour:n,axes:[o,i,c],names:p,depth:l,note:u}){let y=Math.max(e[o],e[i]),$=l?Math.min(l,y):0,f=Gt/(y+$),m=Math.max(3,e[i]*f),b=Math.max(3,e[o]*f),d=$&&Math.max(4,$*f),k=s?Math.max(2,Math.min(m,s[i]*f)):0,A=s?Math.max(2,Math.min(b,s[o]*f)):0,N=(L,ut)=>ut>3&&L/ut>1.5?Array.from({length:Math.min(Math.round(L/ut),cs)-1},(Ea,es)=>ut*(es+1)):[],ts=`${t}: ${p[o]} ${e[o]} by ${p[i]} ${e[i]}${l?`, ${p[c]} ${l}`:""}`;return r`<figure><svg viewBox=${`-20 -16 ${Gt+24} ${Gt+26}`} role="img" aria-label=${ts}>
    ${d>0&&r`<rect y=${d} width=${d} height=${b} class="strip" /><rect x=${d} width=${m} height=${d} class="strip" />
      <text x=${d/2} y=${d-3} class="tick" text-anchor="middle">${d>14?`${p[c]} ${l}`:""}</text>`}
    <g transform=${`translate(${d} ${d})`}>
      <rect width=${m} height=${b} style=${`fill:color-mix(in oklab, ${a} 13%, transparent);stroke:${a};stroke-width:1.5`} />
      ${N(m,k).map(L=>r`<line x1=${L} x2=${L} y2=${b} class="hair" style=${`stroke:${a}`} />`)}
      ${N(b,A).map(L=>r`<line y1=${L} y2=${L} x2=${m} class="hair" style=${`stroke:${a}`} />`)}
      ${s&&r`<rect width=${k} height=${A} style=${`fill:${n}`} opacity="0.85" />`}</g>
    <text x=${d+m/2} y="-5" class="tick" text-anchor="middle">${p[i]} ${e[i]}</text>
    <text transform=${`translate(-7 ${d+b/2}) rotate(-90)`} class="tick" text-anchor="middle">${p[o]} ${e[o]}</text>
  </svg><figcaption><b style=${`color:color-mix(in oklab, ${a} 70%, var(--ink))`}>${t}</b><span>${u}</span></figcaption></figure>`}function ms({axis:t,role:e,thread:s,block:a,whole:n}){let o=i=>n>1?Math.min(1,Math.log2(Math.max(1,i))/Math.log2(n)):1;return r`<div class="ruler"><span>${t}${e!==t&&r`<small>${e}</small>`}</span>
    <svg width="100%" height="12" role="img" aria-label=${`${t}: ${s} of ${a} of ${n}`}>
      <rect y="4" height="4" width="100%" class="track" /><rect y="2" height="8" width=${`${100*o(a)}%`} style="fill:var(--block)" opacity=".75" />
      <rect height="12" width=${`${Math.max(1,100*o(s))}%`} style="fill:var(--thread)" /></svg>
    <em>${s} <i>▸</i> ${a} <i>▸</i> ${n}</em></div>`}function je({tried:t,tile:e}){let{device:s}=h.value,[a,n]=s.tile_levels,o=$s(t),[i,c,p]=o,{block:l,thread:u}=ds(t,e),y=t.extents,$=(m,b)=>Math.ceil(m[i]/b[i])*(c===i?1:Math.ceil(m[c]/b[c])),f=[{name:"whole result",size:y,inner:l,colour:"var(--outer)",innerColour:"var(--block)",note:M($(y,l),"tile")},{name:`task in ${a}`,size:l,inner:u,colour:"var(--block)",innerColour:"var(--thread)",depth:p>=0?l[p]:0,note:M($(l,u),"tile")},{name:`tile in ${n}`,size:u,colour:"var(--thread)",note:t.unit}];return r`<div class="nested" data-testid="tile"><div class="frames">${f.map(m=>r`<${ps} ...${m} axes=${o} names=${t.axes} />`)}</div>
    <div class="rulers">${t.axes.map((m,b)=>r`<${ms} axis=${m} role=${t.roles[b]} thread=${u[b]} block=${l[b]} whole=${y[b]} />`)}</div></div>`}var fs=".cm-editor, input, select, textarea";function Ft({rule:t,needs:e,has:s}){let n=h.value.device.levels.some(({name:o})=>t===o||t.startsWith(`${o} `))||/memory|cache|page/.test(t)?w:dt;return`${t}: needs ${n(e)}, there is ${n(s)}`}function hs(t,e){let s=t.steps[e.parent];if(!s)return t.kind==="scale-up"?"Start":"Tried";if(e.axis==null)return`Made of ${nt(t.axes,s.tile)}`;let a=s.tile[e.axis],n=e.tile[e.axis];return`${t.axes[e.axis]} ${n>a?"grew":"shrank"} ${a} → ${n}`}function gs({tried:t,tile:e}){let s=hs(t,e),a=e.footprint_bytes>0&&t.capacity_bytes>0?`, ${v(e.footprint_bytes/t.capacity_bytes)} of the capacity`:"";if(e.outcome==="rejected")return r`<b>${s}</b>: <span class="bad">stopped by ${e.limit?Ft(e.limit):e.outcome}</span>.`;if(!Se(e))return r`<b>${s}</b>: not aligned yet (${Ft(e.limit)}), so it grows on.`;let n=e.footprint_bytes>0?`fits in ${w(e.footprint_bytes)}${a}.`:"fits.",o=t.kind!=="scale-up"?"":Ut(t,e)?" Memory is still slower than compute: growing pays.":" Compute covers its memory time: it is large enough.";return r`<b>${s}</b>: ${n}${o}${e.seconds>0&&r` The best program with it takes <b>${g(e.seconds)}</b>.`}`}function bs({tried:t,tile:e}){if(!e.growth?.length)return null;let s=Math.max(1e-30,...e.growth.map(a=>a.reuse??0));return r`<table class="growth"><caption>It could grow along</caption>
    <thead><tr><th>axis</th><th>to</th><th class="r">needs</th><th class="r">moves</th><th>traffic saved per byte</th><th>outcome</th></tr></thead>
    <tbody>${e.growth.map((a,n)=>r`<tr class=${n===0?"first":""}>
      <th scope="row">${t.axes[a.axis]}</th><td>${a.extent}</td>
      <td class="r">${a.footprint_bytes>0?w(a.footprint_bytes):"–"}</td>
      <td class="r">${a.traffic_bytes>0&&e.traffic_bytes>0?v(a.traffic_bytes/e.traffic_bytes):"–"}</td>
      <td class="meter"><i style=${`width:${a.reuse==null?100:Math.max(1,100*a.reuse/s)}%;background:${_(h.value.device,t.level)}`}></i></td>
      <td class=${a.limit?"bad":"quiet"}>${a.limit?Ft(a.limit):a.reuse==null?"costs nothing":n===0?"tried first":""}</td></tr>`)}</tbody></table>`}function vs(){let t=new Set((T.value?.found??[]).map(s=>s.search)),e=new Map;return h.value.searches.forEach((s,a)=>{let n=[s.group,s.unit,s.view,s.family].filter(Boolean).join(" · ");e.set(n,[...e.get(n)??[],[s,a]])}),r`<select class="picker" aria-label="search" value=${S.value} onChange=${s=>V(Number(s.target.value),0)}>
    ${[...e].map(([s,a])=>r`<optgroup label=${s}>${a.map(([n,o])=>r`<option value=${o} selected=${o===S.value}>
      ${t.has(o)?"● ":""}${n.kind} · ${n.level}${n.base?` on ${n.base.filter(i=>i>1).join("×")||"1"}`:""}: ${M(n.steps.length,"tile")}</option>`)}</optgroup>`)}</select>`}var ys=()=>r`<div class="chain" role="group" aria-label="tiles of the chosen program">
  ${(T.value?.found??[]).map(t=>{let{level:e}=h.value.searches[t.search];return r`<button class=${t.search===S.value&&t.step===Pt.value?"on":""} style=${`--c:${q(h.value.device,e)}`} onClick=${()=>V(t.search,t.step)}>chosen ${e}</button>`})}</div>`;function Ae(){let t=h.value.searches[S.value],e=(t?.steps.length??0)-1,s=Math.min(Pt.value,e),a=o=>V(S.value,Math.max(0,Math.min(e,s+o)));if(R(()=>{let o=i=>{let c={ArrowRight:1,ArrowLeft:-1}[i.key];c&&!i.target.closest?.(fs)&&!i.altKey&&!i.metaKey&&!i.ctrlKey&&a(c)};return addEventListener("keydown",o),()=>removeEventListener("keydown",o)}),e<0)return r`<section class="panel"><h2>How the tile grew</h2><p class="quiet">This program has no tiles to choose.</p></section>`;let n=t.steps[s];return r`<section class="panel" aria-labelledby="construction-title" data-testid="stepper">
    <header><h2 id="construction-title">How the tile grew</h2><${vs} /><${ys} /></header>
    <div class="two"><div>
        <${Ce} tried=${t} now=${s} /><${Ee} tried=${t} />
        <div class="scrubber">
          <button data-testid="step-previous" aria-label="previous step" disabled=${s===0} onClick=${()=>a(-1)}>←</button>
          <input type="range" min="0" max=${e} value=${s} aria-label="step" onInput=${o=>V(S.value,Number(o.target.value))} />
          <button data-testid="step-next" aria-label="next step" disabled=${s===e} onClick=${()=>a(1)}>→</button>
          <span>${s+1} of ${e+1}</span></div>
        <p class="saying" aria-live="polite" data-testid="step"><code>${nt(t.axes,n.tile)}</code> <${gs} tried=${t} tile=${n} /></p>
        <${bs} tried=${t} tile=${n} /></div>
      <${je} tried=${t} tile=${n} /></div>
  </section>`}var xs=10;async function ws(){let t=W.peek(),e=()=>t===W.peek();try{let s=await mt("/v1/kernels:compile",t);for(;e()&&(vt.value=s,!s.done);)s=await se(`/v1/${s.name}?wait=${xs}`);e()&&s.response&&await fe(s.response,e)}catch(s){e()&&(vt.value={done:!0,error:Qt(s)})}}function ks(t){if(!t)return"";if(t.error)return`failed: ${t.error.detail}`;let{stage:e,cache:s,queue_position:a,waiting_for:n}=t.metadata;return t.done?s==="hit"?"compiled before":"compiled":n?`no worker takes from ${n}`:a>0?`queued behind ${a}`:e}function Ne(){let t=vt.value,e=t&&!t.done;return r`<div class="compile">
    <button data-testid="compile" disabled=${!ke.value||e} onClick=${ws}>Compile</button>
    <span data-testid="status" role="status" class=${t?.error?"bad":"quiet"}>${e&&r`<i class="busy"></i>`}${ks(t)}</span>
  </div>`}var Le=2;function _s({name:t}){let e=ue.value[t]??1;return r`<label class="slider"><span>${t}</span>
    <input type="range" min=${-Le} max=${Le} step=${.5} value=${Math.log2(e)} aria-label=${t} aria-valuetext=${U(e)}
      onChange=${s=>ye(t,2**Number(s.target.value))} /><em>${U(e)}</em></label>
    ${Rt.value?.name===t&&r`<p class="quiet" data-testid="held" role="status">no further: ${Rt.value.reason}</p>`}`}var Re=({kernels:t})=>JSON.stringify(t.map(e=>e.program?.tiles??e.tiles));function Os(){let t=gt.value.find(a=>a.target===B.value)?.candidates?.[0],e=h.value?.programs[0];if(!Q.value||!t||$e.value!==W.value)return null;let s=1-e.seconds/t.seconds;return r`<p data-testid="effect" role="status">${g(t.seconds)} → <b>${g(e.seconds)}</b>,${" "}
    ${Math.abs(s)<5e-4?"as before":`${v(Math.abs(s))} ${s>0?"less":"more"}`};${" "}
    ${Re(t)===Re(e)?"the tiles stay":"other tiles win"}.</p>`}function Ts(){let t=Q.value??Lt.value,[e,s]=O(null),[a,n]=O(null),o=async c=>{s(c.target.value);try{let{hardware:p}=await mt("/v1/hardware:validate",{hardware:c.target.value});n(null),s(null),ve(p)}catch(p){n(p.problem??{detail:p.message,errors:[]})}},i=a&&(a.errors.length?a.errors:[{message:a.detail}]);return r`<details><summary>as text</summary>
    <textarea aria-label="spec as text" rows="12" spellcheck="false" value=${e??JSON.stringify(t,null,1)} onChange=${o}></textarea>
    ${i?.map(c=>r`<p class="bad" role="alert">${c.line&&r`<b>${c.line}:${c.column}</b> `}${c.message}</p>`)}</details>`}function Ie(){let t=Q.value??Lt.value,[e,s]=O(!1),a=({currentTarget:{open:n}})=>{s(n),n&&xe()};return r`<details class="spec" data-testid="spec" open=${e||Q.value!==null} onToggle=${a}>
    <summary>Another device: what if …</summary>
    ${t&&r`${Object.keys(ie(t)).map(n=>r`<${_s} name=${n} />`)}<${Os} />
      ${Q.value&&ht.value.some(n=>n.id===B.value)&&r`<button onClick=${()=>wt(B.value)}>as it is</button>`}<${Ts} />`}
  </details>`}var Ss=180,Cs=["float32","float16","bfloat16","float64","float8_e4m3","float8_e5m2","int8","uint8","int16","int32","int64","bool"];function Es(){let t=$t(),e=$t(),s=$t();R(()=>{let o,i=!1;return import("./editor-VSO2J4KC.js").then(({createEditor:c})=>{if(i)return;let p=l=>{clearTimeout(o),o=setTimeout(()=>ge(s.current=l),Ss)};t.current.textContent="",e.current=c(t.current,G.peek(),p),e.current.mark(P.peek()?.errors??[])}),()=>{i=!0,e.current?.destroy()}},[]);let a=G.value,n=P.value;return R(()=>{a!==s.current&&e.current?.show(a)},[a]),R(()=>e.current?.mark(n?.errors??[]),[n]),r`<div class=${n?.errors.some(o=>o.line)?"editor wrong":"editor"} ref=${t}><pre>${G.peek()}</pre></div>`}function js(){let t=P.value,e=de.value,s=t?.errors.length?t.errors:t?[{message:t.detail}]:[];return r`<div class="diagnostics" data-testid="diagnostics" role="status">
    ${s.map(a=>r`<p><b>${a.line?`${a.line}:${a.column}`:As(a.pointer)??t.code}</b> ${a.message}
      ${a.hint&&r`<span>${a.hint}</span>`}</p>`)}
    ${t&&!kt.value&&r`<p><button data-testid="again" onClick=${Me}>ask again</button></p>`}
    ${It.value&&r`<p class="bad" data-testid="trouble">${It.value}</p>`}
    ${tt.value&&r`<p class="quiet">explaining…</p>`}
    ${!t&&!tt.value&&e!=null&&r`<p class="quiet">explained in ${Math.round(e)} ms</p>`}
  </div>`}var As=t=>t?.replace(/^\/inputs\//,"").replaceAll("/"," "),Ns=t=>t.trim()?t.split(/[^\d]+/).filter(Boolean).map(Number):[];function Ls(){let t=Object.entries(At.value);return t.length?r`<table class="inputs"><caption class="unseen">Inputs</caption>
    <thead><tr><th>input</th><th>type</th><th>shape</th><th title="does not change from call to call, such as weights">fixed</th></tr></thead>
    <tbody>${t.map(([e,{dtype:s,shape:a}])=>r`<tr key=${e}>
      <th scope="row">${e}</th>
      <td><select aria-label=${`type of ${e}`} value=${s} onChange=${n=>Dt(e,{dtype:n.target.value,shape:a})}>
        ${[...new Set([...Cs,s])].map(n=>r`<option selected=${n===s}>${n}</option>`)}</select></td>
      <td><input aria-label=${`shape of ${e}`} value=${a.join(" × ")} inputmode="numeric"
        onChange=${n=>Dt(e,{dtype:s,shape:Ns(n.target.value)})} /></td>
      <td><input type="checkbox" aria-label=${`${e} is constant`} checked=${le.value.includes(e)}
        onChange=${n=>we(e,n.target.checked)} /></td>
    </tr>`)}</tbody></table>`:null}function Rs(){let t={...Nt.value&&{outputs:Nt.value},...ce.value};return Object.keys(t).length?r`<p class="quiet" data-testid="options">${Object.entries(t).map(([e,s])=>`${e} ${typeof s=="string"?s:JSON.stringify(s)}`).join(" · ")}
    <button onClick=${be}>without</button></p>`:null}function Is(){let t=h.value?.device;return t?r`<section class="device"><h2>${t.name}</h2>
    <p class="quiet">${M(t.cores,"core")} · ${t.levels.filter(e=>e.name!==t.tile_levels[1]).map(e=>r`<span style=${`color:${q(t,e.name)}`}>${e.name} ${E(e.bandwidth_bytes_per_s,"B")}${e.assumed?"?":""}</span> `)}</p></section>`:null}function Bs(t){let e=t.candidates?.[0];return e?{target:t.target,seconds:e.seconds,bound:e.bound,floor:t.floor.seconds}:{target:t.target,refused:t.error?.detail??"no candidate"}}var Ps=8;function qs(){let t=gt.value.map(Bs),e=t.length?t:ht.value.map(o=>({target:o.id}));e.sort((o,i)=>(o.seconds??1/0)-(i.seconds??1/0));let s=Ps*(e[0]?.seconds??1),a=Math.min(s,Math.max(...e.map(o=>o.seconds??0))),n=o=>`${Math.min(100,100*o/a)}%`;return r`<section class="elsewhere" data-testid="target"><h2>Devices</h2>
    ${e.map(o=>r`<button key=${o.target} data-testid=${`target-${o.target}`} class=${o.target===B.value?"on":""}
      aria-pressed=${o.target===B.value} title=${o.refused??`bound by ${o.bound}`} onClick=${()=>wt(o.target)}>
      <span>${Zt(o.target)}</span>
      ${o.seconds?r`<svg height="10" width="100%" aria-hidden="true">
          <rect width=${n(o.seconds)} height="10" class=${o.seconds>a?"estimate cut":"estimate"} />
          <rect width=${n(o.floor)} height="10" class="floor" /></svg><em>${g(o.seconds)}</em>`:r`<small>${o.refused?"refused":""}</small><em></em>`}
    </button>`)}
    ${t.length>0&&r`<p class="quiet">Dark: no tiles go below this on the device.</p>`}</section>`}function Be(){let t=ft.findIndex(e=>e.expression===G.value&&e.target===B.value&&JSON.stringify(e.inputs)===JSON.stringify(At.value));return r`<aside class="desk" aria-label="Program">
    <select class="examples" aria-label="example" value=${t} onChange=${e=>he(ft[e.target.value])}>
      ${t<0&&r`<option value="-1" selected>examples…</option>`}
      ${ft.map((e,s)=>r`<option value=${s} selected=${s===t}>${e.name}</option>`)}</select>
    <${Es} /><${js} /><${Ls} /><${Rs} /><${Ne} /><${Is} /><${Ie} /><${qs} />
  </aside>`}var Ds="[\\x21-\\x7e]+";function Pe({load:t}){return te.value?r`<form class="key" onSubmit=${s=>{s.preventDefault(),ee(new FormData(s.currentTarget).get("key")),t()}}>
    <label>This service needs an API key <input name="key" type="password" autocomplete="off" required pattern=${Ds} title="letters, digits and signs of ASCII, without spaces" autofocus /></label>
    <button>use it in this tab</button>
  </form>`:null}var qe=()=>r`<svg width="0" height="0" aria-hidden="true" class="unseen"><defs>
  <pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
    <rect width="5" height="5" style="fill:var(--paper-2)" /><rect width="2.4" height="5" style="fill:var(--exposed)" />
  </pattern></defs></svg>`,x=({seconds:t,fraction:e=1})=>e*t,Ks=(t,e)=>x(e)-x(t),Hs=t=>t.reduce((e,s)=>e+x(s),0),Y=(t,e)=>t.terms.filter(s=>s.combines===e&&x(s)>0).sort(Ks);function rt(t){let e=Y(t,"sums");return[...Y(t,"overlaps").map(a=>[a]),...e.length?[e]:[]].map(a=>({terms:a,name:a.map(n=>n.name).join(" + "),seconds:Hs(a)})).sort((a,n)=>n.seconds-a.seconds)}var Wt=t=>[...Y(t,"adds"),...Y(t,"after")];function Us(t){let e=[],s=[],a=0,n=(o,i)=>{e.push({name:o,seconds:i,start:a}),a+=i};for(let o of t){let i=a,[c,...p]=rt(o);for(let u of c?.terms??[])n(u.name,x(u));for(let u of p)s.push({name:u.terms[0].name,label:u.name,seconds:u.seconds,at:i+u.seconds});for(let u of Y(o,"adds"))n(u.name,x(u));let[l]=Y(o,"floor");l&&x(l)>a-i&&n(l.name,x(l)-(a-i));for(let u of Y(o,"after"))n(u.name,x(u))}return{parts:e,marks:s}}function Ot({kernels:t,device:e,longest:s,height:a=14}){let{parts:n,marks:o}=Us(t),i=l=>`${100*l/s}%`,c=l=>l==="exposed"?"url(#hatch)":_(e,l),p=n.map(l=>`${l.name} ${g(l.seconds)}`).join(", then ");return r`<svg class="terms" width="100%" height=${a} role="img" aria-label=${p}>
    ${n.map(l=>r`<rect x=${i(l.start)} width=${i(l.seconds)} height=${a} style=${`fill:${c(l.name)}`}>
      <title>${l.name}: ${g(l.seconds)}</title></rect>`)}
    ${n.slice(1).map(l=>r`<line x1=${i(l.start)} x2=${i(l.start)} y2=${a} class="cut" />`)}
    ${o.map(l=>r`<line x1=${i(l.at)} x2=${i(l.at)} y1="2" y2=${a} class="under" />
      <line x1=${i(l.at)} x2=${i(l.at)} y1="2" y2=${a} style=${`stroke:${c(l.name)};stroke-width:2`}>
        <title>${l.label} would be done after ${g(l.seconds)}</title></line>`)}
  </svg>`}function De({kernels:t,device:e}){let s=new Map;for(let a of t.flatMap(n=>n.terms))s.set(a.name,(s.get(a.name)??0)+x(a));return r`<ul class="legend">${[...s].map(([a,n])=>r`<li>
    <i class=${a==="exposed"?"dot hatched":"dot"} style=${`--c:${_(e,a)}`}></i>${a}<em>${g(n)}</em></li>`)}</ul>`}var Vt=6,Gs=2.5,Fs=["contraction","attention",""],Js=[["split_k",1,t=>`split-k ${t}`],["stages",1,t=>`${t} stages`],["stream_k",0,t=>`stream-k ${t}`],["pingpong",0,()=>"ping-pong"],["blocks",0,t=>`${t} persistent`],["raster",1,t=>`raster ${t}`]];function Ws(t){let e=Js.filter(([a,n])=>t[a]>n).map(([a,,n])=>n(t[a])),s=[t.cluster_m,t.cluster_n,t.cluster_k].filter(a=>a>1);return[...e,s.length&&`cluster ${s.join("×")}`].filter(Boolean).join(", ")}var Vs=t=>M(Z(t).length,"kernel")+(ot(t).length?`, ${ot(t).length} once`:""),Ke=(t,e)=>Object.entries(t.tiles[e]??{}).filter(([,s])=>s>1).map(([s,a])=>r`<span class="axis">${s}<b>${a}</b></span>`);function Ys({program:t}){let e=Bt.value[ne(t)],s=t.seconds/e-1;return e?r`<td class="r">${g(e)}</td><td class="r">${v(Math.abs(s))} ${s>0?"high":"low"}</td>`:r`<td class="r">–</td><td class="r"></td>`}function He(){let[t,e]=O(!1),{device:s,programs:a,constructions:n}=h.value,[o,i]=s.tile_levels,c=n.reduce((f,m)=>f+m.tiles_visited,0),p=n.flatMap(f=>f.refusals),l=t||J.value>=Vt?a:a.slice(0,Vt),u=Math.min(Math.max(...l.map(f=>f.seconds)),Gs*a[0].seconds),y=Object.keys(Bt.value).length>0,$=(f,m)=>{let b={ArrowDown:m+1,ArrowUp:m-1,Enter:m," ":m}[f.key];b===void 0||!l[b]||(f.preventDefault(),Kt(b),f.currentTarget.parentNode.children[b].focus())};return r`<section class="panel" aria-labelledby="programs-title">
    <header><h2 id="programs-title">Ranked programs</h2><span class="quiet">the best of ${M(c,"tile")} · ↑ ↓ choose</span></header>
    <div class="scroll" tabindex="0" role="group" aria-label="table of programs"><table class="programs" data-testid="programs">
      <thead><tr><th class="r">#</th><th>unit</th><th>${o} tile</th><th>${i} tile</th><th>options</th><th class="wide">terms</th><th class="r">estimate</th>${y&&r`<th class="r">measured</th><th class="r">estimate is</th>`}<th class="r">waves</th><th class="r">occ.</th></tr></thead>
      <tbody>${l.map((f,m)=>{let b=oe(f),d=b.program;return r`<tr key=${m} tabindex=${m===J.value?0:-1} aria-current=${m===J.value} data-testid=${`program-${m}`} class=${m===J.value?"on":""}
          onClick=${()=>Kt(m)} onKeyDown=${k=>$(k,m)}>
          <td class="r">${m+1}</td>
          <td>${d.unit}${!Fs.includes(b.view??"")&&r`<small>${b.view}</small>`}${f.kernels.length>1&&r`<small>${Vs(f)}</small>`}</td>
          <td>${Ke(d,o)}</td><td>${Ke(d,i)}</td><td class="options">${Ws(d)}</td>
          <td class="wide"><${Ot} kernels=${Z(f)} device=${s} longest=${u} /></td>
          <td class="r strong">${g(f.seconds)}</td>${y&&r`<${Ys} program=${f} />`}<td class="r">${b.waves}</td><td class="r">${v(b.occupancy)}</td></tr>`})}</tbody></table></div>
    ${a.length>Vt&&r`<button class="more" onClick=${()=>e(!t)}>${t?"fewer":`all ${a.length}`}</button>`}
    ${p.length>0&&r`<details class="quiet"><summary>${M(p.length,"unit")} refused</summary><ul>${p.map(f=>r`<li>${f}</li>`)}</ul></details>`}
  </section>`}var zs=({dtype:t,shape:e})=>`("${t}", (${e.join(", ")}${e.length===1?",":""}))`,Xs=t=>t.includes(`
`)?`"""
${t.replaceAll("\\","\\\\").replaceAll('"""','\\"\\"\\"')}
"""`:JSON.stringify(t);function Yt(t){return t===null?"None":typeof t=="boolean"?t?"True":"False":Array.isArray(t)?`[${t.map(Yt).join(", ")}]`:typeof t=="object"?`{${Object.entries(t).map(([e,s])=>`${JSON.stringify(e)}: ${Yt(s)}`).join(", ")}}`:JSON.stringify(t)}function Zs({expression:t,inputs:e,outputs:s,target:a,hardware:n,options:o}){let i=Object.entries(e).map(([l,u])=>`        "${l}": ${zs(u)},`),c=Object.entries({...s&&{outputs:s},...o}).map(([l,u])=>`    ${l}=${Yt(u)},
`),p=Object.keys(e).map(l=>`"${l}": ${l}`).join(", ");return`import roller_svc

kernel = roller_svc.compile(
    ${Xs(t)},
    inputs={
${i.join(`
`)}
    },
    ${n?"hardware=spec,  # the changed spec: YAML or JSON text":`target=${JSON.stringify(a)}`},
${c.join("")})
results = kernel.run({${p}})`}var Qs=t=>`'${t.replaceAll("'","'\\''")}'`,Ue='-H "Authorization: Bearer $ROLLER_API_KEY"',ta=t=>`curl -s "$ROLLER_SERVER/v1/kernels:compile" ${Ue} \\
  -H 'Content-Type: application/json' -H 'Prefer: wait=60' \\
  -d ${Qs(JSON.stringify(t))}`,Ge=(t,e)=>`curl -s "$ROLLER_SERVER/v1/kernels/${t}/bundle?launcher=${e}" ${Ue} -o kernel.zip
unzip -q kernel.zip -d kernel`,ea=t=>`# with kernel/ in sys.path
import launch

results = launch.Kernel()(${Object.keys(t.inputs).map(e=>`${e}=${e}`).join(", ")})`,Tt=t=>(e,s)=>`${Ge(e,t)}

${ea(s)}`,Fe=(t,e)=>(s,a,n)=>`${Ge(s,"cpp")}

#include "kernel/${t}"
${e(n)}`,sa={ctypes:Tt("ctypes"),torch:Tt("torch"),"c++":Fe("kernel.h",t=>`// ${t}_run(...) takes the addresses of inputs and results`)},aa={cupy:Tt("cupy"),torch:Tt("torch"),"c++":Fe("launch.hpp",t=>`${t}_launcher kernel;  // then kernel.load(image) and kernel.launch(addresses..., stream)`)};function Je(t,e){let s={python:Zs(t),curl:ta(t)};if(!e)return s;let a=e.launches[0].name.replace(/_kernel\d+$/,""),n=Object.entries(e.language==="c"?sa:aa);return{...s,...Object.fromEntries(n.map(([o,i])=>[o,i(e.digest,t,a)]))}}var na=/(\/\/.*$|\/\*.*?\*\/|"[^"]*"|#\s*\w+|\b\d[\w.]*\b|\b[A-Za-z_]\w*\b)/,oa=new Set("alignas auto bool break case char const constexpr continue do double else extern float for if inline int long return short signed sizeof static struct switch template typename unsigned void volatile while".split(" ")),ra=t=>/^(\/\/|\/\*)/.test(t)?"comment":/^["#]/.test(t)?"string":/^\d/.test(t)?"number":oa.has(t)||/^__\w+__$/.test(t)?"word":/^(wgmma|tma|mma|mbarrier|barrier|cp_async|ldmatrix|_mm)/.test(t)?"instruction":null,ia=({text:t})=>t.split(na).map(e=>{let s=e&&ra(e);return s?r`<i class=${s}>${e}</i>`:e}),St=new Map;function la(t,e){let[s,a]=O(null),n=`/v1/kernels/${t}/${e}`;return R(()=>{if(!t)return;let o=!1;return St.has(n)||St.set(n,ae(n)),a(null),St.get(n).then(i=>o||a({text:i}),i=>{St.delete(n),o||a({error:i.message})}),()=>o=!0},[n]),s}function ca({digest:t,kind:e}){let s=la(t,e);if(!s)return r`<p class="quiet" role="status">Reading ${e}…</p>`;if(s.error)return r`<p class="bad" role="status">${s.error}</p>`;let a=s.text.split(`
`);return r`<div class="listing" data-testid=${e} tabindex="0" role="group" aria-label=${e}><pre>${a.map((n,o)=>r`<span class="line"><i class="at">${o+1}</i><${ia} text=${n} />${`
`}</span>`)}</pre></div>`}function ua(){let[t,e]=O("python"),[s,a]=O(!1),n=Je(W.value,F.value),o=n[t]??n.python,i=async()=>{await navigator.clipboard.writeText(o),a(!0),setTimeout(()=>a(!1),1500)};return r`<div class="launch"><h3>Use it</h3>
    <div class="choices">${Object.keys(n).map(c=>r`<button aria-pressed=${c===t} onClick=${()=>e(c)}>${c}</button>`)}<button onClick=${i}>${s?"copied":"copy"}</button></div>
    <pre data-testid="launch-code" tabindex="0">${o}</pre></div>`}function $a({kernel:t}){let e=["source",...t.language==="cuda"?["ptx","sass"]:[]],s=e.includes(yt.value)?yt.value:"source",[a]=t.resources,[n]=t.launches,o=[n&&`${M(t.launches.length,"launch").replace("launchs","launches")}`,t.language!=="c"&&n&&`grid ${n.grid.join("×")}, block ${n.block.join("×")}`,a?.registers_per_thread>0&&`${a.registers_per_thread} registers`,a?.shared_bytes>0&&`${w(a.shared_bytes)} shared`,a?.spill_bytes>0&&`spills ${w(a.spill_bytes)}`].filter(Boolean);return r`<p class="quiet">${o.join(" · ")} · <a class="mono" href=${`/k/${t.digest}`}>${t.digest.slice(0,19)}</a></p>
    ${h.value&&xt.value<0&&r`<p class="note">The kernel is none of the programs above.</p>`}
    ${t.notes.map(i=>r`<p class="note">${i}</p>`)}
    <div class="choices">${e.map(i=>r`<button aria-pressed=${i===s} onClick=${()=>yt.value=i}>${i}</button>`)}</div>
    <${ca} digest=${t.digest} kind=${s} />`}function zt(){let t=F.value;return r`<section class="panel" aria-labelledby="text-title"><header><h2 id="text-title">Kernel</h2></header>
    ${t?r`<${$a} kernel=${t} />`:r`<p class="quiet">Not compiled: all of the above is the model's word. Compile builds the first program.</p>`}
    ${G.value&&r`<${ua} />`}</section>`}var z=460,X=280,at=54,it=34,We=14,lt=14;function da({terms:t,operations:e}){let s=t.filter(n=>n.unit==="operations").sort((n,o)=>o.amount-n.amount),a=t.find(n=>n.name==="compute");return s[0]?.rate??(a&&e.executed/a.seconds)}function Ve(){let{device:t}=h.value,e=T.value,s=e.operations.executed,a={name:e.program.unit,rate:da(e)},n=t.levels.filter(o=>o.name!==t.tile_levels[1]).map(o=>({level:o,term:e.terms.find(i=>i.name===o.name&&i.unit==="B"&&i.amount>0)})).filter(({term:o})=>o).map(({level:o,term:i})=>({name:o.name,rate:i.rate,moved:i.amount,intensity:s/i.amount,assumed:i.source==="assumed",fill:_(t,o.name)}));return{kernel:e,operations:s,unit:a,levels:n,reached:s/e.seconds}}function Ye(){let{unit:t,levels:e,reached:s}=Ve();if(!e.length||!(t.rate>0)||!(s>0))return null;let a=t.rate,n=e.flatMap($=>[$.intensity,a/$.rate]),o=Math.min(...n)/4,i=Math.max(...n)*4,c=Math.max(a,s)*2.5,p=Math.min(s,a/30)/4,l=$=>at+(z-at-lt)*Math.log($/o)/Math.log(i/o),u=$=>X-it-(X-it-We)*Math.log($/p)/Math.log(c/p),y=`${E(s,"operations")} of ${E(a,"operations")}: `+e.map($=>`${$.name} ${pt($.intensity)} op per byte`).join(", ");return r`<figure class="roofline"><svg viewBox=${`0 0 ${z} ${X}`} data-testid="roofline" role="img" aria-label=${y}>
    ${jt(o,i).map($=>r`<line x1=${l($)} x2=${l($)} y1=${We} y2=${X-it} class="grid" />
      <text x=${l($)} y=${X-it+13} class="tick" text-anchor="middle">${$<1?$.toPrecision(1):dt($)}</text>`)}
    ${jt(p,c).map($=>r`<line x1=${at} x2=${z-lt} y1=${u($)} y2=${u($)} class="grid" />
      <text x=${at-5} y=${u($)+3} class="tick" text-anchor="end">${I($,"").trim()}</text>`)}
    <text x=${(at+z)/2} y=${X-4} class="label" text-anchor="middle">operations per byte of a level</text>
    <text x=${-(X-it)/2} y="11" class="label" text-anchor="middle" transform="rotate(-90)">operations per second</text>
    <line x1=${l(Math.max(o,a/Math.max(...e.map($=>$.rate))))} x2=${z-lt} y1=${u(a)} y2=${u(a)} class="roof" />
    <text x=${z-lt} y=${u(a)-4} class="tick strong" text-anchor="end">${t.name} ${E(a,"operations")}</text>
    ${e.map($=>{let f=Math.max(o,p/$.rate),m=Math.min(i,a/$.rate);return r`<line x1=${l(f)} y1=${u(f*$.rate)} x2=${l(m)} y2=${u(m*$.rate)} style=${`stroke:${$.fill};stroke-width:2`} />`})}
    <line x1=${at} x2=${z-lt} y1=${u(s)} y2=${u(s)} class="reached" />
    ${e.map($=>r`<line x1=${l($.intensity)} x2=${l($.intensity)} y1=${u(s)} y2=${u(Math.min(a,$.intensity*$.rate))} style=${`stroke:${$.fill}`} class="headroom" />
      <circle cx=${l($.intensity)} cy=${u(s)} r="5.5" style=${`fill:${$.fill}`}><title>${$.name}: ${w($.moved)}, ${pt($.intensity)} op/B</title></circle>`)}
  </svg><figcaption>A dot is below its own line by the bandwidth that its level leaves unused.</figcaption></figure>`}function ze(){let{kernel:t,operations:e,unit:s,levels:a}=Ve(),n=(o,i)=>v(o/i/t.seconds);return r`<table class="levels"><thead><tr><th>level</th><th class="r">moves</th><th class="r">op/B</th><th class="r">busy</th></tr></thead><tbody>
    ${a.map(o=>r`<tr><th scope="row"><i class="dot" style=${`--c:${o.fill}`}></i>${o.name}${o.assumed?r`<small title="the rate is assumed, not measured"> ?</small>`:""}</th>
      <td class="r">${w(o.moved)}</td><td class="r">${pt(o.intensity)}</td><td class="r">${n(o.moved,o.rate)}</td></tr>`)}
    ${s.rate>0&&r`<tr><th scope="row"><i class="dot" style="--c:var(--compute)"></i>${s.name}</th><td class="r" colspan="2">${I(e,"operations")}</td><td class="r">${n(e,s.rate)}</td></tr>`}
  </tbody></table>`}var Ze=.01,pa=5,Xe=t=>t.reduce((e,s)=>e+x(s),0),ct=({name:t})=>r`<i class="dot" style=${`--c:${_(h.value.device,t)}`}></i>`;function ma({amount:t,unit:e,rate:s,source:a}){return e!=="B"&&e!=="operations"?"":`${I(t,e)} at ${E(s,e)}${a==="assumed"?" (assumed)":""}, `}function fa(t){let[e,s]=rt(t);if(e){let[o,...i]=e.terms,c=i.length?`${g(x(o))} of ${g(e.seconds)}, to which ${i.map(p=>p.name).join(", ")} add`:`${ma(o)}${g(e.seconds)}`;return r`<li><${ct} name=${o.name} /><b>${o.name} takes longest</b>: ${c}.
      ${s&&` ${s.name} beside it would be done after ${g(s.seconds)}.`}</li>`}let[a,n]=Wt(t).sort((o,i)=>x(i)-x(o));return a?r`<li><${ct} name=${a.name} /><b>Mostly ${a.name}</b>: ${v(x(a)/t.seconds)} of the time${n&&`, then ${n.name} with ${v(x(n)/t.seconds)}`}. These terms add up.</li>`:null}function ha({name:t,unit:e}){return e==="B"?`${t} bandwidth`:Ht.includes(t)&&e==="operations"?"arithmetic rate":"issue rate"}function ga({limited_by:t=[]},e){let[s]=t,a=rt(e)[0]?.terms[0];if(!a||!s||s.saved<Ze)return null;let n=ha(a),o=t.find(i=>i.resource===n)??{resource:n,saved:0};return s===o||s.saved<2*o.saved?null:r`<li><${ct} name=${s.resource.split(" ")[0]} /><b>But ${s.resource} limits</b>: 10 % more of it saves ${v(s.saved)},
    10 % more ${o.resource} ${o.saved<5e-4?"nothing":`only ${v(o.saved)}`}.</li>`}function ba(t){let e=Z(t),s=e.flatMap(Wt);if(!e.some(o=>rt(o).length)||Xe(s)<Ze*t.seconds)return null;let a=new Map;for(let o of s)a.set(o.name,(a.get(o.name)??0)+x(o));let n=[...a].map(([o,i])=>`${o} ${g(i)}`).join(", ");return r`<li><${ct} name="exposed" />Not hidden: ${n}. That is ${v(Xe(s)/t.seconds)} of the time.</li>`}function va({operations:t}){let e=t.executed/t.definition;return Math.abs(e-1)>.02?r`<li><${ct} name="compute" />It executes ${I(t.executed,"operations")}, ${v(e)} of the${" "}
    ${I(t.definition,"operations")} of the definition.</li>`:null}function ya(t){let e=ot(t);return e.length?r`<li data-testid="once"><i class="dot" style="--c:var(--ink-3)"></i>Once, before all calls: ${g(e.reduce((s,a)=>s+a.seconds,0))}${" "}
    of ${e.map(s=>s.group).join(", ")}, of constants alone. No call has it.</li>`:null}function xa(t,e){return e?r`<li><i class="dot" style="--c:var(--ink-3)"></i>No tiles go below ${g(e.seconds)}${" "}
    (${e.arithmetic_seconds>e.traffic_seconds?`${I(e.operations,"operations")} on ${e.unit}`:`${w(e.bytes)} once through ${e.level}`}):${" "}
    this is ${U(t.seconds/e.seconds)} that.</li>`:null}function wa(t){let e=F.value?.measurement?.median_s;if(!e)return null;let s=t.seconds/e-1;return r`<li><i class="dot" style="--c:var(--good)"></i>Measured ${g(e)}: the estimate is ${v(Math.abs(s))} ${s>0?"high":"low"}.</li>`}function ka({resources:t}){if(!t)return r`<p class="quiet" data-testid="sensitivity">What more of each resource saves is known of the first program.</p>`;let e=t.filter(s=>s.saved>5e-4).slice(0,pa);return r`<div data-testid="sensitivity"><h3>10 % more of … saves</h3>
    ${e.map(({resource:s,saved:a})=>r`<div class="saves"><span>${s}</span>
      <svg height="8" width="100%" aria-hidden="true"><rect width=${`${Math.min(100,1e3*a)}%`} height="8" style=${`fill:${_(h.value.device,s.split(" ")[0])}`} /></svg>
      <em>${(100*a).toFixed(1)} %</em></div>`)}
    ${!e.length&&r`<p class="quiet">Nothing above 0.05 %.</p>`}</div>`}function Qe(){let{device:t,floor:e}=h.value,s=pe.value,a=T.value,n=Z(s),o=[["bound",r`<span style=${`color:${q(t,s.bound)}`}>${s.bound}</span>`],e&&["above the floor",U(s.seconds/e.seconds)],["rate",E(re(s)/s.seconds,"operations")],["waves",a.waves],["occupancy",v(a.occupancy)],s.uncertainty&&["true within",U(s.uncertainty)]].filter(Boolean);return r`<section class="panel verdict" aria-labelledby="verdict-title" data-testid="verdict">
    <h2 class="unseen" id="verdict-title">Verdict</h2>
    <div class="headline"><p class="big" data-testid="estimate">${g(s.seconds)}</p>
      <dl>${o.map(([i,c])=>r`<div><dt>${i}</dt><dd>${c}</dd></div>`)}</dl></div>
    <${Ot} kernels=${n} device=${t} longest=${s.seconds} height=${26} />
    <${De} kernels=${n} device=${t} />
    <div class="why"><div>
        <ul class="sentences">${fa(a)}${ga(s,a)}${ba(s)}${va(a)}${ya(s)}${xa(s,e)}${J.value===xt.value&&wa(s)}</ul>
        <div class="facts"><${ka} resources=${s.limited_by} /><${ze} /></div></div>
      <${Ye} /></div>
  </section>`}var Ma=()=>r`<svg width="18" height="18" viewBox="0 0 18 18" aria-hidden="true">
  <rect width="18" height="18" rx="2" style="fill:var(--outer)" />
  <rect width="12" height="12" style="fill:var(--block)" />
  <rect width="6" height="6" style="fill:var(--thread)" />
</svg>`,_a=[["Kernel","/"],["Model","/m"],["Farm","/farm"]],Et=/^\/m(\/|$)/.test(location.pathname)?"/m":location.pathname==="/farm"?"/farm":"/";function Oa({address:t}){let[e,s]=O(!1),a=async o=>{o.preventDefault(),await navigator.clipboard.writeText(new URL(t.value,location.href).href),s(!0),setTimeout(()=>s(!1),1500)},n=qt.value==="dark"?"light":"dark";return r`<header class="top">
    <a class="brand" href="/"><${Ma} /><b>roller</b></a>
    <nav aria-label="pages">${_a.map(([o,i])=>r`<a href=${i} aria-current=${i===Et?"page":null}>${o}</a>`)}</nav>
    <a class="link" data-testid="permalink" href=${t.value} onClick=${a}>${e?"copied":"copy link"}</a>
    <button class="theme" onClick=${()=>qt.value=n}>${n}</button>
  </header>`}function Ta(){let t=bt.value&&r`<p class="note" data-testid="remark">${bt.value}</p>`;return!h.value&&F.value?r`${t}<${zt} />`:h.value?r`${P.value&&!bt.value&&r`<p class="note">Below is the last program ${kt.value?"without errors":"that was explained"}.</p>`}${t}<${Qe} /><${Ae} /><${He} /><${zt} />`:r`<p class="waiting" role="status">${P.value?"":"Constructing tiles…"}</p>`}var Sa=()=>r`<main class="kernel"><h1 class="unseen">Why this tile</h1><${Be} /><div class=${["work",P.value&&"old",tt.value&&"waits"].filter(Boolean).join(" ")} aria-busy=${tt.value}><${Ta} /></div></main>`,Ct=Et==="/m"?await import("./modelpage-4YUAENF4.js"):Et==="/farm"?await import("./farm-5YBVZUZJ.js"):{Page:Sa,address:me,load:_e};document.title={"/":"roller: see why this tile","/m":"roller: a model","/farm":"roller: the build farm"}[Et];var Ca=()=>r`<${qe} /><${Oa} address=${Ct.address} /><${Pe} load=${Ct.load} /><${Ct.Page} />`;Ct.load();Xt(r`<${Ca} />`,document.getElementById("app"));
