// Vercel's AI SDK with @ai-sdk/anthropic.

import { createAnthropic } from '@ai-sdk/anthropic';
import { KEY, SLOW_URL, URL } from './flows.mjs';
import { runAiSdk } from './ai_sdk.mjs';

runAiSdk('@ai-sdk/anthropic', createAnthropic({ baseURL: `${URL}/v1`, apiKey: KEY }), createAnthropic({ baseURL: `${SLOW_URL}/v1`, apiKey: KEY }));
